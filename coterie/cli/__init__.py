"""The ``coterie`` command."""


def main() -> None:
    """Run the command line of this process (:mod:`coterie.cli.program`)."""
    from coterie.cli import program  # imports the commands of all rooms, which import modules of this package

    program.main()
