"""Run a script as `processes` processes of torchrun would, forked from one that has imported torch.

forked.py PROCESSES SCRIPT [ARGUMENT …]
"""

import os
import runpy
import socket
import sys
import traceback

import torch  # noqa: F401 - once, for all


def run(rank: int, processes: int, port: int, script: str) -> int:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ |= {name: str(value) for name, value in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [script, *sys.argv[3:]]
    try:
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
    except SystemExit as ended:
        sys.stdout.flush()
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    processes, script = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            os._exit(run(rank, processes, port, script))
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
