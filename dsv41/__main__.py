"""`python -m dsv41`, where the command is not on the path."""

from dsv41.cli import main

main()
