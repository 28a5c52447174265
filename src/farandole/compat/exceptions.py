"""The exception of `horovod.common.exceptions` that programs name but farandole never raises."""


class HorovodVersionMismatchError(ImportError):
    """Error for a framework whose version differs from the one that its binding was built with."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.version, self.installed_version)


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message that `name` was built with a version other than the installed one."""
    return f"{name} {version} was expected, but {name} {installed_version} is installed"
