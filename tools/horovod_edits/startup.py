"""Edits to what horovodrun does before it starts ranks, without which 8 ranks on two hosts start a second later."""

from __future__ import annotations

from horovod_edits.edit import Edit

STARTUP_EDITS = [
    Edit(
        path="horovod/runner/common/util/network.py",
        old="        self._thread = in_thread(target=self._server.serve_forever)\n",
        new="        self._thread = in_thread(target=self._server.serve_forever, args=(0.02,))\n",
        reason="it looks every 0.5 s whether to end, and horovodrun waits for that",
    ),
    # The helpers on the hosts end meanwhile. Where they had not when mpirun took this process's place, Python warned of
    # their leaked semaphores.
    Edit(
        path="horovod/runner/util/threads.py",
        old="    # Returns the results only if block_until_all_done is set.\n    results = None\n",
        new="    # Returns the results only if block_until_all_done is set, else what to wait for.\n    results = threads\n",
        reason="lets the caller wait for the helpers",
    ),
    Edit(
        path="horovod/runner/driver/driver_service.py",
        old="    threads.execute_function_multithreaded(_exec_command,\n"
        "                                           args_list,\n"
        "                                           block_until_all_done=False)\n",
        new="    return threads.execute_function_multithreaded(_exec_command,\n"
        "                                                  args_list,\n"
        "                                                  block_until_all_done=False)\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/driver/driver_service.py",
        old="    _launch_task_servers(all_host_names, local_host_names,\n                         driver.addresses(), settings)\n",
        new="    helpers = _launch_task_servers(all_host_names, local_host_names,\n"
        "                                   driver.addresses(), settings)\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/driver/driver_service.py",
        old="        return _run_probe(driver, settings, num_hosts)\n",
        new="        nics = _run_probe(driver, settings, num_hosts)\n"
        "        for helper in helpers:\n"
        "            helper.join(2)\n"
        "        return nics\n",
        reason="waits for them",
    ),
    # A command that only answers needs no guardian: each is a fresh Python that imports horovodrun again.
    Edit(
        path="horovod/runner/common/util/tiny_shell_exec.py",
        old="""\
    output = io.StringIO()
    try:
        exit_code = safe_shell_exec.execute(command, env=env, stdout=output, stderr=output)
        output_msg = output.getvalue()
    except Exception:
        print(traceback.format_exc(), file=sys.stderr)
        return None
    finally:
        output.close()

    return output_msg, exit_code
""",
        new="""\
    done = subprocess.run(command, shell=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout, done.returncode
""",
        reason="mpirun --version",
    ),
    Edit(
        path="horovod/runner/common/util/tiny_shell_exec.py",
        old="import io\nimport sys\nimport traceback\n\nfrom horovod.runner.common.util import safe_shell_exec\n",
        new="import subprocess\n",
        reason="what the line above needs",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="""\
                exit_code = safe_shell_exec.execute(command,
                                                    stdout=output,
                                                    stderr=output)
                if exit_code == 0:
""",
        new="""\
                exit_code, printed = subprocess.getstatusoutput(command)
                output.write(printed)
                if exit_code == 0:
""",
        reason="whether ssh reaches a host",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="import os\nimport sys\nimport textwrap\n",
        new="import os\nimport subprocess\nimport sys\nimport textwrap\n",
        reason="subprocess",
    ),
]
