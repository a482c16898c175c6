"""``python -m apportion`` is the program ``apportion``."""

from apportion.cli.app import main

if __name__ == "__main__":
    main()
