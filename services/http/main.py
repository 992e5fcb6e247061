"""The HTTP process. The web server's packages are an extra, so they are imported here, where one may be missing."""

from phalanx.protocol.errors import ConfigError
from phalanx.protocol.service import Service


def serve(service: Service) -> None:
    """Raises ConfigError when the packages are not there or the configuration cannot be used."""
    service.progress("http")
    try:
        import uvloop

        from phalanx.services.http.web import Web
    except ImportError as error:
        raise ConfigError(
            f"HTTP needs packages that are not installed ({error}): pip install 'phalanx-serve[http]'"
        ) from error
    uvloop.run(Web(service).run())
