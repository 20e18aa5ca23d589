# What horovodrun is given, checked before anything is started. The patch 0049-mistakes-in-one-line puts this into
# Horovod's launch.py, whose names it uses.
# ruff: noqa: F821

MOST_BYTES = 2**16  # of a configuration file
MOST_RANKS = 2**16

# Sections of a configuration file (docs/running.rst), the prefix of their options' names, and what else they take.
_CONFIG_SECTIONS = {
    "params": ("", "fusion_threshold_mb cycle_time_ms cache_capacity hierarchical_allreduce hierarchical_allgather "
                   "torus_allreduce"),
    "autotune": ("autotune_", "enabled log_file warmup_samples steps_per_sample bayes_opt_max_samples "
                              "gaussian_process_noise"),
    "timeline": ("timeline_", "filename mark_cycles"),
    "stall_check": ("stall_check_", "enabled warning_time_seconds shutdown_time_seconds"),
    "library_options": ("", "mpi_threads_disable num_nccl_streams thread_affinity gloo_timeout_seconds"),
    "logging": ("log_", "level with_timestamp"),
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says in one line what was expected and what was received, instead of the usage and a word on the error."""

    def error(self, message):
        forms = [
            (r"argument (\S+): invalid int value: (.*)", "a whole number for {0}", "{1}", "correct it"),
            (r"argument (\S+): invalid float value: (.*)", "a number for {0}", "{1}", "correct it"),
            (r"argument (\S+): expected (?:.*) arguments?", "a value for {0}", "none", "add it"),
            (r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", "one of {2} for {0}", "{1}", "take another"),
            (r"argument (\S+): not allowed with argument (.*)", "{1} or {0}", "both", "leave one out"),
            (r"the following arguments are required: -np/--num-proc", "-np NUMBER, the number of processes", "none",
             "give it, as in -np 2"),
            (r"unrecognized arguments: (.*)", "options of horovodrun, then a command", "{0}",
             "write the command's own options after it; horovodrun --help lists horovodrun's"),
        ]  # fmt: skip
        for pattern, expected, received, remedy in forms:
            match = re.fullmatch(pattern, message, re.DOTALL)
            if match:
                text = f"expected {expected}, received {received}; {remedy}".format(*map(_in_one_line, match.groups()))
                raise hosts.UsageError(text)
        raise hosts.UsageError(f"expected arguments as horovodrun --help lists them, received: {_in_one_line(message)}")


def _in_one_line(text):
    """Without what a terminal obeys, and not endless."""
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _quoted(value):
    return _in_one_line(repr(value))


def _load_config(path):
    """The options in a YAML file, which name sections and keys that there are."""
    text = hosts.read_file(path, "a configuration file in YAML", MOST_BYTES)
    try:
        depth = 0
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > 3:  # a few lines can mean gigabytes, or take minutes
                raise yaml.YAMLError("aliases, or lists in lists, of which there are none in a configuration")
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = _in_one_line(" ".join(str(error).split()))
        raise hosts.UsageError(
            f"expected plain YAML in {path}, received something else: {reason}; correct it"
        ) from None
    if not isinstance(config, dict):
        raise hosts.UsageError(
            f"expected sections such as params: in {path}, received {_quoted(config)}; see horovodrun's documentation"
        )
    for section, options in config.items():
        if section == "controller":
            if not isinstance(options, str) or options.lower() not in ("mpi", "gloo"):
                raise hosts.UsageError(f"expected mpi or gloo as controller in {path}, received {_quoted(options)}")
            continue
        if section not in _CONFIG_SECTIONS:
            raise hosts.UsageError(
                f"expected one of controller, {', '.join(_CONFIG_SECTIONS)} in {path}, received {_quoted(section)}; "
                "correct it"
            )
        keys = _CONFIG_SECTIONS[section][1].split()
        if not isinstance(options, dict):
            raise hosts.UsageError(
                f"expected some of {', '.join(keys)} under {section} in {path}, received {_quoted(options)}; correct it"
            )
        for key in options:
            if key not in keys:
                raise hosts.UsageError(
                    f"expected one of {', '.join(keys)} under {section} in {path}, received {_quoted(key)}; correct it"
                )
            if key == "enabled" and not isinstance(options[key], bool):
                raise hosts.UsageError(
                    f"expected true or false for enabled under {section} in {path}, received {_quoted(options[key])}"
                )
    return config


def _check_values(parser, args):
    """Types and ranges, whether from the command line or from a configuration file."""
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if value is None or not action.option_strings:
            continue
        name = action.option_strings[0]
        for number in value if action.nargs == 2 else [value]:
            types = {int: (int,), float: (int, float)}.get(action.type)
            if types and (not isinstance(number, types) or isinstance(number, bool)):
                raise hosts.UsageError(f"expected a number for {name}, received {_quoted(number)}; correct it")
            if types and not -(2**31) < number < 2**31:
                raise hosts.UsageError(f"expected {name} of less than 2^31, received {_quoted(number)}; correct it")
        if action.choices and value not in action.choices:
            choices = ", ".join(action.choices)
            raise hosts.UsageError(f"expected one of {choices} for {name}, received {_quoted(value)}; correct it")
        if action.type is None and action.nargs == 1 and not isinstance(value, (str, set)):  # a set of interfaces
            raise hosts.UsageError(f"expected a word for {name}, received {_quoted(value)}; put it in quotes")
        if type(action).__name__ == "StoreOverrideBoolAction" and not isinstance(value, bool):
            raise hosts.UsageError(f"expected true or false for {name}, received {_quoted(value)}; correct it")

    at_least_one = {
        "-np": args.num_proc, "--min-np": args.min_num_proc, "--max-np": args.max_num_proc,
        "--slots-per-host": args.slots, "--start-timeout": args.start_timeout,
        "--elastic-timeout": args.elastic_timeout, "--ssh-port": args.ssh_port,
        "--max-host-failures": args.max_host_failures,
    }  # fmt: skip
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise hosts.UsageError(f"expected {name} of at least 1, received {value}; raise it")
    if args.num_proc is not None and args.num_proc > MOST_RANKS:
        raise hosts.UsageError(f"expected -np of at most {MOST_RANKS}, received {args.num_proc}; lower it")
    if args.ssh_port is not None and args.ssh_port >= 2**16:
        raise hosts.UsageError(f"expected --ssh-port below {2**16}, received {args.ssh_port}; lower it")
    fewest, most = args.min_num_proc or args.num_proc, args.max_num_proc
    if most is not None and fewest is not None and most < fewest:
        raise hosts.UsageError(f"expected --max-np of at least {fewest}, received {most}; raise it")
    if most is not None and not _is_elastic(args):
        raise hosts.UsageError(
            f"expected --min-np or --host-discovery-script with --max-np, received --max-np {most} alone; leave it out"
        )
    if args.cooldown_range and not 1 <= args.cooldown_range[0] <= args.cooldown_range[1] <= 3600:
        received = " ".join(map(str, args.cooldown_range))
        raise hosts.UsageError(
            "expected two numbers of seconds from 1 to 3600 for --blacklist-cooldown-range, the smaller one first, "
            f"received {received}; correct it"
        )
    for name in ("HOROVOD_START_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        value = os.environ.get(name, "1")
        if not re.fullmatch("[0-9]{1,9}", value):
            raise hosts.UsageError(f"expected a number of seconds in {name}, received {_quoted(value)}; unset it")


def _check_files(args):
    """Files that horovodrun and its ranks read and write."""
    if args.ssh_identity_file is not None and not os.path.isfile(args.ssh_identity_file):
        raise hosts.UsageError(
            f"expected a file for --ssh-identity-file, received {_quoted(args.ssh_identity_file)}; name another"
        )
    written = {
        "--timeline-filename": args.timeline_filename,
        "--autotune-log-file": args.autotune_log_file,
        "HOROVOD_TIMELINE": os.environ.get("HOROVOD_TIMELINE"),
    }
    for name, path in written.items():
        if not path or (name != "--autotune-log-file" and path == "DYNAMIC"):
            continue
        folder = os.path.dirname(os.path.abspath(path))
        if (os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK)) and _takes_part(args):
            raise hosts.UsageError(
                f"expected a file to write for {name}, received {_quoted(path)}; name another, or make its folder"
            )
    if args.output_filename is not None:
        try:
            os.makedirs(args.output_filename, exist_ok=True)
        except OSError as error:
            raise hosts.UsageError(
                f"expected a folder to write for --output-filename, received {_quoted(args.output_filename)}: "
                f"{error.strerror}; name another"
            ) from None


def _check_networks(nics, *, here):
    """Names of interfaces reach command lines; `here`: this host must have them."""
    known = network.net_if_addrs()
    for name in sorted(nics or ()):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,14}", name) or (here and name not in known):
            raise hosts.UsageError(
                f"expected a network interface such as {', '.join(known)}, received {_quoted(name)}; name another"
            )


def _check_commands(args):
    """Whether this host finds the program, where it takes part, and the script that finds hosts."""
    script = args.host_discovery_script
    if script is not None:
        program = script.split()[0] if script.strip() else ""
        if not program or (re.fullmatch(r"[\w./-]+", program) and shutil.which(program) is None):
            raise hosts.UsageError(
                f"expected a program for --host-discovery-script, received {_quoted(script)}; correct it"
            )
    if not args.command:
        raise hosts.UsageError("expected a command to run, received none; give one, as in horovodrun -np 2 python x.py")
    program = args.command[0]
    if "=" not in program and shutil.which(program) is None and _takes_part(args):
        raise hosts.UsageError(
            f"expected a program to run, received {_quoted(program)}, which is none; "
            + (f"did you mean python {_in_one_line(program)}?" if os.path.isfile(program) else "correct the command")
        )


def _takes_part(args):
    """Whether this host is known to run some of the processes."""
    if args.host_discovery_script is not None or lsf.LSFUtils.using_lsf():
        return False
    listed = args.hosts
    if listed is None:
        listed = hosts.parse_host_files(args.hostfile) if args.hostfile is not None else "localhost:1"
    names = hosts.parse_hosts_and_slots(listed)[0]
    return len(network.filter_local_addresses(names)) < len(names)
