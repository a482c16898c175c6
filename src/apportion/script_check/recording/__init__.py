"""What runs inside the processes of a script: hooks that write down what it does, and the script itself."""
