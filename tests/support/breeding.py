"""Ways in which handlers leave processes behind. `tell` prints `pid N` for each."""

from __future__ import annotations

from typing import Final

PRELUDE: Final = """
import os, subprocess, sys, time
def tell(pid): print('pid', pid, flush=True)
def fork_without_exec():
    pid = os.fork()
    if pid == 0:
        while True: time.sleep(1000)
    tell(pid)
def double_fork(clean=False, setsid=True):
    there, here = os.pipe()
    if os.fork() == 0:
        if setsid: os.setsid()
        if os.fork() == 0:
            tell(os.getpid())
            os.write(here, b'.')
            os.execve('/bin/sleep', ['sleep', '999'], {} if clean else os.environ)
        os._exit(0)
    os.wait()
    os.read(there, 1)
    os.close(there), os.close(here)
def three_levels():
    code = '''
import os, sys, time
os.setpgid(0, 0)
print('pid', os.getpid(), flush=True)
level, end, code = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if level: os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, '-c', code, str(level - 1), end, code])
else: os.write(int(end), b'.')
time.sleep(999)
'''
    there, here = os.pipe()
    subprocess.Popen([sys.executable, '-c', code, '2', str(here), code], pass_fds=[here])
    os.read(there, 1)
    os.close(there), os.close(here)
"""

WAYS: Final = {
    "plain": "tell(subprocess.Popen(['sleep', '999']).pid)",
    "setsid": "tell(subprocess.Popen(['sleep', '999'], start_new_session=True).pid)",
    "nohup": "tell(subprocess.Popen(['nohup', 'sleep', '999'], stdout=2, stderr=subprocess.DEVNULL).pid)",
    "shell": "subprocess.run(['sh', '-c', 'sleep 999 & echo pid $!'])",
    "double_fork": "double_fork()",
    "double_fork_same_group": "double_fork(setsid=False)",
    "forked_without_exec": "fork_without_exec()",
    "three_levels": "three_levels()",
    "cleared_environment": "double_fork(clean=True)",
}
