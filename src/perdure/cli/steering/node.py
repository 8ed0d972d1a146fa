"""`perdure node`: what is done to one node of a job, or makes a machine one."""

import typer

from perdure.cli.platforms.remote import scale
from perdure.cli.steering.act import cordon, drain, evict, notify, restore
from perdure.cli.steering.join import invite, join

app = typer.Typer(help="Nodes that come and go.", no_args_is_help=True)
for _command in (drain, cordon, evict, restore, notify, invite, join, scale):
    app.command()(_command)
