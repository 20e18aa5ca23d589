"""Edits to horovodrun for what goes wrong: hosts that are down or cut off, ranks that die, signals to horovodrun."""

from __future__ import annotations

from horovod_edits.edit import Edit

FAULT_EDITS = [
    # A host that is down before the start.
    Edit(
        path="horovod/runner/launch.py",
        old="""\
        for i in range(SSH_ATTEMPTS):
            output = io.StringIO()
""",
        new="""\
        for i in range(SSH_ATTEMPTS):
            started = time.monotonic()
            output = io.StringIO()
""",
        reason="the time that an attempt takes",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="""\
            finally:
                output.close()
        return exit_code, output_msg
""",
        new="""\
            finally:
                output.close()
            if time.monotonic() - started > SSH_CONNECT_TIMEOUT_S / 4:
                break
        return exit_code, output_msg
""",
        reason="a host that does not answer was tried five times, 44 s; sshd that turns a connection down, since it has "
        "many, does so at once and is worth another attempt",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="import textwrap\nimport warnings\n",
        new="import textwrap\nimport time\nimport warnings\n",
        reason="time.monotonic",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="""\
            print('ssh not successful for host {host}:\\n{msg_output}'
                  .format(host=host_addresses[index],
                          msg_output=output_msg))
""",
        new="""\
            print('horovodrun: cannot reach {host} by ssh: {reason}'
                  .format(host=host_addresses[index],
                          reason=output_msg.strip() or 'exit status {}'.format(exit_code)), file=sys.stderr)
""",
        reason="one line a host, on standard error",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="            raise RuntimeError('could not connect to some hosts via ssh')\n        if settings.verbose",
        new="            sys.exit(1)\n        if settings.verbose",
        reason="the lines above say it; a traceback of horovodrun says no more",
    ),
    # A host that is cut off while the job runs, or that went down since horovodrun looked (it remembers for an hour).
    Edit(
        path="horovod/runner/util/remote.py",
        old="SSH_COMMAND_PREFIX = 'ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no'\n",
        new="""\
# ssh waited for ever for a host that had been cut off; now it gives up after 25 s.
SSH_OPTIONS = '-o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=5'
SSH_COMMAND_PREFIX = f'ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no {SSH_OPTIONS}'
""",
        reason="ssh must notice a link that is cut",
    ),
    Edit(
        path="horovod/runner/mpi_run.py",
        old="    ssh_args = []\n    if settings.ssh_port:\n",
        new="    ssh_args = [] if impi_or_mpich else [SSH_OPTIONS]\n    if settings.ssh_port:\n",
        reason="the same for the ssh that Open MPI starts",
    ),
    Edit(
        path="horovod/runner/mpi_run.py",
        old="from horovod.runner.common.util import env as env_util, hosts, safe_shell_exec, tiny_shell_exec\n",
        new="from horovod.runner.common.util import env as env_util, hosts, safe_shell_exec, tiny_shell_exec\n"
        "from horovod.runner.util.remote import SSH_OPTIONS\n",
        reason="the options of the line above",
    ),
    # A rank that dies.
    Edit(
        path="horovod/runner/gloo_run.py",
        old="                          .format(idx=index, ec=exit_code), file=sys.stderr)\n"
        "                terminate_all_event.set()\n",
        new="                          .format(idx=index, ec=exit_code), file=sys.stderr)\n"
        "                    time.sleep(1)  # the other ranks know more, and leave by themselves\n"
        "                terminate_all_event.set()\n",
        reason="the ranks that notice that another one is gone were killed before they could say which, and where",
    ),
    # Signals to horovodrun.
    Edit(
        path="horovod/runner/mpi_run.py",
        old="['/bin/sh', '-c', mpirun_command]",
        new="['/bin/sh', '-c', 'exec ' + mpirun_command]",
        reason="signals to horovodrun ended the shell in between, and mpirun and the job ran on",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="    def set_event_on_signal(signum, frame):\n        event.set()\n",
        new="    def set_event_on_signal(signum, frame):\n        event.signum = signum\n        event.set()\n",
        reason="for the message and the exit status",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="""\
                                                 block_until_all_done=True)

    for name, value in sorted(""",
        new="""\
                                                 block_until_all_done=True)

    if event.is_set():
        print('horovodrun: stopped by {}.'.format(signal.Signals(event.signum).name), file=sys.stderr)
        sys.exit(128 + event.signum)

    for name, value in sorted(""",
        reason="says why the job ended, and never ends with status 0 after a signal",
    ),
    Edit(
        path="horovod/runner/common/util/safe_shell_exec.py",
        old="""\
    # Terminate children gracefully.
    for child in p.children():
        try:
            child.terminate()
        except psutil.NoSuchProcess:
            pass

    # Wait for graceful termination.
    gone, alive = psutil.wait_procs(p.children(), timeout=GRACEFUL_TERMINATION_TIME_S)

    # Freeze the process to prevent it from spawning any new children.
    try:
        p.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        pass
""",
        new="""\
    # Terminate children gracefully. A shell may have replaced itself by its only command.
    children = p.children() or [p]
    for child in children:
        try:
            child.terminate()
        except psutil.NoSuchProcess:
            pass

    # Wait for graceful termination.
    gone, alive = psutil.wait_procs(children, timeout=GRACEFUL_TERMINATION_TIME_S)

    # Freeze the process to prevent it from spawning any new children.
    try:
        if alive:
            p.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        pass
""",
        reason="a rank that was the shell's own process was frozen before it could save anything, and a shell without "
        "children was waited for in vain for 5 s, since it was frozen",
    ),
    Edit(
        path="horovod/runner/common/util/safe_shell_exec.py",
        old="    # Kill shell itself.\n    try:\n        p.terminate()\n",
        new="    # Kill shell itself.\n    try:\n        p.kill() if alive else p.terminate()\n",
        reason="a shell that was frozen, since ranks did not end, gets no SIGTERM: another 5 s in vain",
    ),
]
