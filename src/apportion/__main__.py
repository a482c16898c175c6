"""``python -m apportion`` is the program ``apportion``."""

from apportion.cli import main

if __name__ == "__main__":
    main()
