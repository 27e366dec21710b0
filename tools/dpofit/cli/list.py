"""`dpofit list`."""
import typer
def command(family: str = typer.Option(None)) -> None:
    """The recipes."""
    print("x")
