"""`fmsdata schema`: which keys a configuration may have, for editors."""

from fmsdata.cli.common import print_json


def schema() -> None:
    """Print the JSON schema of the configuration, for completion and checks in an editor."""
    from fmsdata.config.sections import Config

    print_json(Config.model_json_schema())
