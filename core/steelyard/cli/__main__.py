"""Run the command line as ``python -m steelyard.cli``, which is what ``torchrun -m`` needs."""

from steelyard.cli import main

if __name__ == "__main__":
    main()
