"""What several tests share. It knows the package and :mod:`tests.recorded`, no test."""
