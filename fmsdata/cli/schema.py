"""`fmsdata schema`: what may stand in a configuration, for editors."""

from fmsdata.cli.common import print_json
from fmsdata.config.sections import Config


def schema() -> None:
    """Print the JSON schema of the configuration, so that an editor can complete and check it as you write."""
    print_json(Config.model_json_schema())
