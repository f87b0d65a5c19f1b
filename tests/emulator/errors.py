class EmulatorError(RuntimeError):
    """What a kernel did wrong, with its name, the buffer, the byte offset and the thread where they are known."""
