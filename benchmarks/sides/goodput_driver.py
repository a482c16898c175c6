"""The driver of a run by ssh() that goes on until Ctrl-C, and says what happens to it.

python goodput_driver.py ADDRESS CONFIGURATION RUN_DIR HOST...
"""

import contextlib
import sys

import apportion


def main(address, configuration, run_dir, *hosts):
    launcher = apportion.ssh(*hosts, options=("-F", configuration), workers=1, threads=1)
    policy = apportion.Policy(max_restarts=10**6)
    given = {"launcher": launcher, "run_dir": run_dir, "policy": policy, "check": False}
    with contextlib.closing(apportion.run(address, "data_parallel", **given)) as events:
        for event in events:
            if event.kind == "fault":
                print(event.data["cause"], event.data["action"], sep=": ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
