"""What pyproject.toml cannot say: the folder ``models_zoo`` is installed as ``graphmem.zoo``, in the one package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["graphmem", "graphmem.*"]), "graphmem.zoo"],
    package_dir={"graphmem.zoo": "models_zoo"},
)
