"""Programs that read NIR files and run them, each in a process of its own, where they are installed."""
