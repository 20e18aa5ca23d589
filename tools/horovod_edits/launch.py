"""Edits to horovodrun and to hvd.init(): how ranks start, find each other, and end."""

from __future__ import annotations

from horovod_edits.edit import Edit

LAUNCH_EDITS = [
    Edit(
        path="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which as find_executable\n",
        reason="Python 3.12 has no distutils",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="argparse.ArgumentParser(description='Horovod Runner')",
        new="argparse.ArgumentParser(description='Horovod Runner', allow_abbrev=False)",
        reason="a flag of the program that it runs, such as --timeline, was taken for an abbreviation of horovodrun's",
    ),
    Edit(
        path="horovod/common/gloo/gloo_controller.cc",
        old="global_ranks_.reserve(size_);",
        new="global_ranks_.resize(size_);",
        reason="the ranks are written into the vector's reserved memory, its size stays 0, and so the stall check "
        "of the Gloo controller sees no rank and never fires",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n",
        new="class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n"
        "    # All ranks connect at once, each for every other rank.\n"
        "    request_queue_size = 1024\n\n",
        reason="with the default backlog of 5 connections are dropped and tried again a second later: "
        "hvd.init takes seconds at 8 ranks",
    ),
    # What was built is written down by CMake and read by horovodrun, which else imports TensorFlow in a child
    # process, twice, to ask it (5 s before anything is launched).
    Edit(
        path="CMakeLists.txt",
        old='"\\"dummy\\": \\"none\\"\\n}")\n',
        new='"\\"dummy\\": \\"none\\"")\n'
        "foreach(_CAPABILITY IN ITEMS MPI GLOO NCCL DDL CCL)\n"
        "    string(TOLOWER ${_CAPABILITY} _NAME)\n"
        "    if(HAVE_${_CAPABILITY})\n"
        "        set(_BUILT true)\n"
        "    else()\n"
        "        set(_BUILT false)\n"
        "    endif()\n"
        '    file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json" ",\\n\\"${_NAME}_built\\": ${_BUILT}")\n'
        "endforeach()\n"
        'file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json" "\\n}")\n',
        reason="records in metadata.json what was built",
    ),
    *(
        Edit(
            path="horovod/common/util.py",
            old=f"""\
    for ext_base_name in EXTENSIONS:
        built_fn = lambda ext: ext.{label.lower()}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {label}', verbose)
        if result is not None:
            return result
    return None
""",
            new=f"    return _build_record().get('{label.lower()}_built')\n",
            reason="reads the record instead of importing a framework",
        )
        for label in ("MPI", "Gloo", "NCCL", "DDL", "CCL")
    ),
    Edit(
        path="horovod/common/util.py",
        old="@_cache\ndef mpi_built(",
        new="""\
@_cache
def _build_record():
    \"\"\"What CMake wrote into metadata.json when it built the extensions; empty if none was built.\"\"\"
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "metadata.json")
    if not os.path.exists(path):
        return {}
    with open(path) as f:
        return json.load(f)


@_cache
def mpi_built(""",
        reason="reads the record",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="    _run(args)\n\n\nif __name__",
        new="""\
    # The environment that horovodrun belongs to need not be activated: its mpirun and its python are meant.
    bin_dir = os.path.join(sys.prefix, 'bin')
    path = os.environ.get('PATH', os.defpath)
    if bin_dir not in path.split(os.pathsep):
        os.environ['PATH'] = bin_dir + os.pathsep + path

    try:
        _run(args)
    except ProcessFailed as e:
        sys.exit(e.exit_code)


if __name__""",
        reason="finds mpirun without an activated environment; ends with the failed process's own exit status",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="from horovod.runner.gloo_run import gloo_run, gloo_run_elastic\n",
        new="from horovod.runner.gloo_run import ProcessFailed, gloo_run, gloo_run_elastic\n",
        reason="the exception that run_commandline catches",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="def _pad_rank(rank, size):\n",
        new="""\
class ProcessFailed(RuntimeError):
    \"\"\"A process of the job ended with a status other than 0.\"\"\"

    def __init__(self, name, exit_code):
        super().__init__('Horovod detected that one or more processes exited with non-zero '
                         'status, thus causing the job to be terminated. The first process '
                         'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                         .format(name=name, code=exit_code))
        self.exit_code = exit_code


def _pad_rank(rank, size):
""",
        reason="carries the exit status to horovodrun, and is the RuntimeError that horovod.run() always raised",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="""\
            raise RuntimeError('Horovod detected that one or more processes exited with non-zero '
                               'status, thus causing the job to be terminated. The first process '
                               'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                               .format(name=name, code=exit_code))


""",
        new="            raise ProcessFailed(name, exit_code)\n\n\n",
        reason="horovodrun --gloo must end with the failed process's own exit status, not with 1 and a traceback",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="""\
                raise RuntimeError('Horovod detected that one or more processes exited with non-zero '
                                   'status, thus causing the job to be terminated. The first process '
                                   'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                                   .format(name=name, code=exit_code))
""",
        new="                raise ProcessFailed(name, exit_code)\n",
        reason="the same in elastic mode",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="            if exit_code != 0:\n                print('Process {idx} exit with status code {ec}.'.format(idx=index, ec=exit_code))\n",
        new="            if exit_code != 0 and settings.elastic:\n"
        "                print('Process {idx} exit with status code {ec}.'.format(idx=index, ec=exit_code))\n",
        reason="one line about the first failure, not one for each process that is stopped because of it",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="""\
            if not any(ev.is_set() for ev in all_events):
                print('Terminating remaining workers after failure of Process {idx}.'.format(idx=index))
            terminate_all_event.set()
""",
        new="""\
            with first_failure:
                if not any(ev.is_set() for ev in all_events):
                    print('horovodrun: process {idx} ended with exit status {ec}; the others are stopped.'
                          .format(idx=index, ec=exit_code), file=sys.stderr)
                terminate_all_event.set()
""",
        reason="says once which process failed and how; the lock keeps it once when all fail together",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="    terminate_all_event = None if settings.elastic else threading.Event()\n",
        new="    terminate_all_event = None if settings.elastic else threading.Event()\n    first_failure = threading.Lock()\n",
        reason="the lock of the line above",
    ),
    Edit(
        path="horovod/common/basics.py",
        old="        atexit.register(self.shutdown)\n\n        initialization_ok = True\n",
        new="""\
        atexit.register(self.shutdown)

        # Open MPI from a wheel does not know where it is installed. mpirun tells its processes; a process that no
        # launcher started must find out itself, or MPI_Init aborts.
        if 'OPAL_PREFIX' not in os.environ and os.path.exists(os.path.join(sys.prefix, 'bin', 'orted')):
            os.environ['OPAL_PREFIX'] = sys.prefix

        initialization_ok = True
""",
        reason="hvd.init() in a process started alone aborted in MPI_Init",
    ),
    Edit(
        path="horovod/common/basics.py",
        old="import os\nfrom typing import *\n",
        new="import os\nimport sys\nfrom typing import *\n",
        reason="sys.prefix",
    ),
]
