"""What the servers of other makers have in common: the net, opened as apportion opens it
(src/apportion/exporting/onnxruntime_session.py), and when they end."""

import os
import signal
import threading

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime


def session(path, threads):
    """Threads that wait block; nothing is printed."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answer(y):
    """As the Open Inference Protocol has it."""
    return {"outputs": [{"name": "output", "datatype": "FP32", "shape": list(y.shape), "data": y.ravel().tolist()}]}


def until_input_ends():
    """Of standard input, which whoever started this process has closed then, or is dead. The descriptor itself is
    read: a thread that waits in sys.stdin would hold its lock, which whatever is forked meanwhile waits for."""
    while os.read(0, 1 << 10):
        pass


def end_with_input():
    """To this process what Ctrl-C sends, then."""

    def wait():
        until_input_ends()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()
