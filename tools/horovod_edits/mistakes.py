"""Edits to horovodrun for what users get wrong: `horovodrun: expected ..., received ...; what to do`, and status 2."""

from __future__ import annotations

from pathlib import Path

from horovod_edits.edit import Edit

_CHECKS = Path(__file__).with_name("inserted").joinpath("checks.py").read_text(encoding="utf-8")

_HOST_EDITS = [
    Edit(
        path="horovod/runner/common/util/hosts.py",
        old="class HostInfo:\n",
        new='''\
class UsageError(ValueError):
    """A mistake of the user: expected ..., received ...; what to do."""


MOST_BYTES = 2**20  # of a host file
MOST_SLOTS = 1024  # of a host
# Names are handed on to shells.
_NAME = re.compile(r'[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?')
_ENTRY = re.compile(r'([^\\s:]+)(?::|\\s+slots\\s*=\\s*)([0-9]{1,9})(?:\\s+max[-_]slots\\s*=\\s*[0-9]+)?')


def read_file(path, what, most_bytes):
    """The text of a file of the user: a regular one of bounded size."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
        with open(path if regular else os.devnull, 'rb') as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f'expected {what}, received {path!a}: {error}; name another') from None
    if not regular:
        raise UsageError(f'expected {what}, received {path}, which is no regular file; name another')
    if len(content) > most_bytes:
        raise UsageError(f'expected {what} of at most {most_bytes} bytes, received more in {path}; name another')
    return content.decode(errors='replace')


def parse_host(entry, where):
    """Name and slots from `server1:4` or `server1 slots=4`."""
    match = _ENTRY.fullmatch(entry)
    if not match:
        raise UsageError(f'expected NAME:SLOTS or NAME slots=SLOTS in {where}, received {entry[:60]!a}; '
                         'write it as in server1:4')
    name, slots = match[1], int(match[2])
    if not _NAME.fullmatch(name):
        raise UsageError(f'expected a host name of letters, digits, dots, hyphens and underscores in {where}, '
                         f'received {name[:60]!a}; correct it')
    if not 1 <= slots <= MOST_SLOTS:
        raise UsageError(f'expected 1 to {MOST_SLOTS} slots for {name} in {where}, received {slots}; correct it')
    return name, slots


class HostInfo:
''',
        reason="one place that reads hosts, wherever they come from",
    ),
    Edit(
        path="horovod/runner/common/util/hosts.py",
        old="import collections\nimport re\n",
        new="import collections\nimport os\nimport re\nimport stat\n",
        reason="what the line above needs",
    ),
    Edit(
        path="horovod/runner/common/util/hosts.py",
        old="""\
    with open(filename, 'r') as f:
        for line in f.readlines():
            line = line.rstrip()
            hostname = line.split()[0]
            slots = line.split('=')[1]
            hosts.append('{name}:{slots}'.format(name=hostname, slots=slots))
    return ','.join(hosts)
""",
        new="""\
    for number, line in enumerate(read_file(filename, 'a host file', MOST_BYTES).split('\\n'), 1):
        entry = line.partition('#')[0].strip()
        if entry:
            hosts.append('{}:{}'.format(*parse_host(entry, f'{filename}, line {number}')))
    if not hosts:
        raise UsageError(f'expected a host in {filename}, received none; write one as in server1 slots=4')
    return ','.join(hosts)
""",
        reason="a line without slots, an empty one or a comment: list index out of range",
    ),
    Edit(
        path="horovod/runner/common/util/hosts.py",
        old="""\
    host_list = hosts.split(',')
    pattern = re.compile(r'^[\\w.-]+:[0-9]+$')
    for host in host_list:
        if not pattern.match(host.strip()):
            raise ValueError('Invalid host input, please make sure it has '
                             'format as : worker-0:2,worker-1:2.')
        hostname, slots = host.strip().split(':')
        host_names.append(hostname)
        host_to_slots[hostname] = int(slots)
""",
        new="""\
    for host in hosts.split(','):
        hostname, slots = parse_host(host.strip(), 'the list of hosts')
        if hostname in host_to_slots:
            raise UsageError(f'expected each host once, received {hostname} again; add its slots up in one entry')
        host_names.append(hostname)
        host_to_slots[hostname] = slots
""",
        reason="a host named -V was an option of ssh; of a host given twice the slots of the first were lost",
    ),
    Edit(
        path="horovod/runner/elastic/discovery.py",
        old="""\
            host = line
            if ':' in line:
                host, slots = line.split(':')
                host_slots[host] = int(slots)
            # Make sure the host is not empty. The discovery script might
            # return empty string when all workers are not ready or available.
            elif host:
                host_slots[host] = self._default_slots
""",
        new="""\
            # The discovery script might return empty string when all workers are not ready or available.
            if line.strip():
                entry = line.strip() if ':' in line else f'{line.strip()}:{self._default_slots}'
                host, slots = hosts.parse_host(entry, 'the output of the host discovery script')
                host_slots[host] = slots
""",
        reason="what a script prints is handed on to shells as well",
    ),
    Edit(
        path="horovod/runner/elastic/discovery.py",
        old="""\
            raise RuntimeError(
                'Failed to execute discovery script: {}. Exit code: {}' .format(
                    self._discovery_script, exit_code))
""",
        new="""\
            raise hosts.UsageError(
                'expected a host discovery script that ends with status 0, received {} from {}; correct it'.format(
                    exit_code, self._discovery_script))
""",
        reason="one line where the first call fails",
    ),
    Edit(
        path="horovod/runner/elastic/discovery.py",
        old="from horovod.runner.common.util import safe_shell_exec\n",
        new="from horovod.runner.common.util import hosts, safe_shell_exec\n",
        reason="for the lines above",
    ),
]

_LAUNCH_EDITS = [
    Edit(
        path="horovod/runner/launch.py",
        old="def parse_args():\n",
        new=f"{_CHECKS}def parse_args():\n",
        reason="the checks",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="import os\nimport subprocess\n",
        new="import os\nimport re\nimport shutil\nimport subprocess\n",
        reason="what they need",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="argparse.ArgumentParser(description='Horovod Runner', allow_abbrev=False)",
        new="_Parser(description='Horovod Runner', allow_abbrev=False)",
        reason="one line",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="""\
        with open(args.config_file, 'r') as f:
            config = yaml.load(f, Loader=yaml.FullLoader)
        config_parser.set_args_from_config(args, config, override_args)
    config_parser.validate_config_args(args)
""",
        new="""\
        config_parser.set_args_from_config(args, _load_config(args.config_file), override_args)
    _check_values(parser, args)
    config_parser.validate_config_args(args)
    if args.command[:1] == ['--']:
        del args.command[0]
""",
        reason="unknown sections and keys were ignored, values of another type gave tracebacks",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="""\
def run_commandline():
    args = parse_args()

    if args.log_level:
""",
        new="""\
def run_commandline():
    try:
        _run_arguments()
    except hosts.UsageError as e:
        print(f'horovodrun: {e}', file=sys.stderr)
        sys.exit(2)


def _run_arguments():
    args = parse_args()

    if args.log_level:
""",
        reason="the one line",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="    try:\n        _run(args)\n    except ProcessFailed as e:\n",
        new="    _check_commands(args)\n    _check_files(args)\n"
        "    try:\n        _run(args)\n    except ProcessFailed as e:\n",
        reason="with the PATH of the lines above",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="    if not args.hosts and not args.host_discovery_script:\n        if args.hostfile:\n",
        new="    if args.hosts is None and not args.host_discovery_script:\n        if args.hostfile is not None:\n",
        reason="-H '' was taken for localhost",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="            # Set hosts to localhost if not specified\n",
        new="""\
            if args.num_proc > hosts.MOST_SLOTS:
                raise hosts.UsageError(f'expected at most {hosts.MOST_SLOTS} processes on one host, received -np '
                                       f'{args.num_proc}; lower it, or give hosts')
            # Set hosts to localhost if not specified
""",
        reason="a million processes were started, until the machine ended that",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="    all_host_names, _ = hosts.parse_hosts_and_slots(args.hosts)\n    if settings.verbose >= 2:\n",
        new="""\
    all_host_names, host_to_slots = hosts.parse_hosts_and_slots(args.hosts)
    if sum(host_to_slots.values()) < args.num_proc:
        raise hosts.UsageError(f'expected at most {sum(host_to_slots.values())} processes, the slots of the hosts, '
                               f'received -np {args.num_proc}; lower it, or give more slots')
    _check_networks(args.nics, here=is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun))
    if settings.verbose >= 2:
""",
        reason="a page of mpirun's, or a traceback",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="            raise ValueError('Cannot run in fault tolerance mode with fewer than 2 hosts.')\n",
        new="            raise hosts.UsageError('expected two hosts or more for an elastic job (--min-np), received '\n"
        "                                   f'{args.hosts}; add one, or leave --min-np out')\n",
        reason="one line",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="    # construct host discovery component\n",
        new="    _check_networks(args.nics, here=True)\n    # construct host discovery component\n",
        reason="as for a job of fixed size",
    ),
    Edit(
        path="horovod/runner/driver/driver_service.py",
        old="        raise ValueError('No interface is found for address 127.0.0.1.')\n",
        new="        raise UsageError('expected the interface of 127.0.0.1, as all hosts are this one, received '\n"
        "                         f'{\", \".join(sorted(settings.nics or ()))}; leave --network-interfaces out')\n",
        reason="--network-interfaces eth0 for a job on this host",
    ),
    Edit(
        path="horovod/runner/driver/driver_service.py",
        old="from horovod.runner.common.util import codec, safe_shell_exec\n",
        new="from horovod.runner.common.util import codec, safe_shell_exec\n"
        "from horovod.runner.common.util.hosts import UsageError\n",
        reason="for the line above",
    ),
    Edit(
        path="horovod/runner/common/util/config_parser.py",
        old="        raise ValueError('{}={} must be >= 0'.format(arg_name, value))\n",
        new="        raise UsageError('expected --{} of at least 0, received {}; raise it'\n"
        "                         .format(arg_name.replace('_', '-'), value))\n",
        reason="one line",
    ),
    Edit(
        path="horovod/runner/common/util/config_parser.py",
        old="        raise ValueError('{}={} must be in [0, 1]'.format('autotune_gaussian_process_noise',\n"
        "                                                          args.autotune_gaussian_process_noise))\n",
        new="        raise UsageError(f'expected --autotune-gaussian-process-noise from 0 to 1, received {noise}; correct it')\n",
        reason="one line",
    ),
    Edit(
        path="horovod/runner/common/util/config_parser.py",
        old="HOROVOD_FUSION_THRESHOLD = ",
        new="from horovod.runner.common.util.hosts import UsageError\n\nHOROVOD_FUSION_THRESHOLD = ",
        reason="for the lines above",
    ),
]

# Words of the user that stood in the lines of a shell as they are.
_QUOTING_EDITS = [
    Edit(
        path="horovod/runner/util/remote.py",
        old="    identity_file_arg = f'-i {identity_file}' if identity_file is not None else ''\n",
        new="    identity_file_arg = f'-i {quote(identity_file)}' if identity_file is not None else ''\n",
        reason="a space in the file's name, or worse",
    ),
    Edit(
        path="horovod/runner/util/remote.py",
        old="from horovod.runner.common.util import env as env_util, secret\n",
        new="from shlex import quote\n\nfrom horovod.runner.common.util import env as env_util, secret\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/mpi_run.py",
        old="        output.append(settings.output_filename)\n",
        new="        output.append(quote(settings.output_filename))\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/mpi_run.py",
        old="settings.extra_mpi_args if settings.extra_mpi_args else ''",
        new="_requoted(settings.extra_mpi_args) if settings.extra_mpi_args else ''",
        reason="these are several words, but no more than words",
    ),
    Edit(
        path="horovod/runner/mpi_run.py",
        old="    binding_args = settings.binding_args if",
        new="    binding_args = _requoted(settings.binding_args) if",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/mpi_run.py",
        old="def mpi_run(settings, nics, env, command, stdout=None, stderr=None):\n",
        new="""\
def _requoted(words):
    return ' '.join(map(quote, split(words)))


def mpi_run(settings, nics, env, command, stdout=None, stderr=None):
""",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/mpi_run.py",
        old="from shlex import quote\n",
        new="from shlex import quote, split\n",
        reason="the same",
    ),
]

_ELASTIC_EDITS = [
    Edit(
        path="horovod/runner/elastic/driver.py",
        old="        if exit_code == 0:\n            rendezvous_id",
        new="""\
        if exit_code == USAGE_ERROR:
            self._results.add_result(f'{slot_info.hostname}[{slot_info.local_rank}]', (exit_code, timestamp))
            self.stop()
            return

        if exit_code == 0:
            rendezvous_id""",
        reason="a program that refuses its arguments was started again and again",
    ),
    Edit(
        path="horovod/runner/elastic/driver.py",
        old="ELASTIC_TIMEOUT_SECS = 600\n",
        new="ELASTIC_TIMEOUT_SECS = 600\n"
        "USAGE_ERROR = 2  # the exit status of programs that refuse their arguments: another start is no use\n",
        reason="for the lines above",
    ),
    Edit(
        path="horovod/runner/elastic/driver.py",
        old="                    self._shutdown.set()\n                    self._wait_hosts_cond.notify_all()\n                    raise\n",
        new="                    self._discovery_error = e\n"
        "                    self._shutdown.set()\n                    self._wait_hosts_cond.notify_all()\n                    return\n",
        reason="two tracebacks",
    ),
    Edit(
        path="horovod/runner/elastic/driver.py",
        old="                    raise RuntimeError('Job has been shutdown, see above error messages for details.')\n",
        new="                    raise self._discovery_error or RuntimeError('Job has been shutdown.')\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/elastic/driver.py",
        old="        self._shutdown = threading.Event()\n",
        new="        self._shutdown = threading.Event()\n        self._discovery_error = None\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="        current_hosts = driver.wait_for_available_slots(settings.num_proc, min_hosts=min_hosts)\n",
        new="""\
        current_hosts = driver.wait_for_available_slots(settings.num_proc)
        addresses = map(network.resolve_host_address, current_hosts.host_assignment_order)
        if not all((address or '').startswith('127.') for address in addresses):  # no other host reaches such a one
            current_hosts = driver.wait_for_available_slots(settings.num_proc, min_hosts=min_hosts)
""",
        reason="a job on localhost waited ten minutes for a second host, which could not have reached it",
    ),
]

MISTAKE_EDITS = [*_HOST_EDITS, *_LAUNCH_EDITS, *_QUOTING_EDITS, *_ELASTIC_EDITS]
