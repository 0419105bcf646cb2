"""Packaging of VirtMan: the agent (virtman), the coordinator (volt), the drivers, OpenNebula's, a patch for Nova."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools_rust import RustBin

PACKAGES = ("virtman", "volt", "drivers", "opennebula_tm", "openstack_nova_patch")
OPENNEBULA = Path("opennebula_tm")
SCRIPTS = [str(path.relative_to(OPENNEBULA)) for path in (OPENNEBULA / "remotes").rglob("*") if path.is_file()]
"""What the installer copies into OpenNebula. Whether a package keeps that a script can be executed does not matter."""

CHUNKD = Path("chunkd/Cargo.toml")

RUST = [
    RustBin(
        "virtman-chunkd",
        str(CHUNKD),
        args=["--target-dir", "build/chunkd"],  # that of lab/bootstrap
        cargo_manifest_args=["--locked"],
        rust_version=">=1.85",  # rust-version in Cargo.toml
        debug=False,  # not even in an editable install
    )
]
"""The chunk store. Without Rust or its sources, all but this program is installed."""

setup(
    name="virtman",
    version="0.4.0",
    description="On-demand, lazy-boot block layer for homogeneous virtual machines",
    python_requires=">=3.11",
    packages=find_packages(include=[name for package in PACKAGES for name in (package, f"{package}.*")]),
    package_data={
        "volt": ["migrations/*.mako", "migrations/versions/*.py"],
        "opennebula_tm": ["driver/*.sh", *SCRIPTS],
        "openstack_nova_patch": ["series/*/*"],
    },
    rust_extensions=RUST if CHUNKD.exists() and shutil.which("cargo") else [],
    install_requires=[
        "alembic>=1.13",
        "blake3>=1.0",
        "click>=8.1",
        "Flask>=3.0",
        "flask-openapi3>=4.0,<5",
        "httpx>=0.27",
        "libvirt-python>=9.0",
        "prometheus-client>=0.20",
        "pycdlib>=1.14",
        "pydantic>=2.6",
        "rich>=13.7",
        "SQLAlchemy>=2.0",
        "tenacity>=8.2",
        "waitress>=3.0",
    ],
    extras_require={
        "bittorrent": ["libtorrent>=2.0.8"],
        "postgresql": ["psycopg[binary]>=3.1"],
        "test": ["coverage>=7.10", "hypothesis>=6.100", "pytest>=8.0", "testtools>=2.7"],
        # For tests on the machine itself, but not in guests.
        "test-tools": ["pytest-xdist>=3.5", "schemathesis>=4.0", "tox>=4.11"],
        "lint": ["import-linter>=2.0", "mypy>=1.10", "ruff>=0.5"],
    },
    entry_points={
        "console_scripts": [
            "virtman = virtman.cli:main",
            "volt = volt.cli:main",
            "virtman-opennebula-install = opennebula_tm.installer.cli:main",
            "virtman-nova-patch = openstack_nova_patch.tool.cli:main",
        ],
        "virtman.drivers.source": ["chunkstore = drivers.chunkstore.source:ChunkSource"],
        "virtman.drivers.attach": ["iscsi = drivers.attach.iscsi:IscsiAttach"],
        "virtman.drivers.cache": [
            "bcache = drivers.cache.bcache:BcacheCache",
            "dmcache = drivers.cache.dmcache:DmCache",
        ],
        "virtman.drivers.export": ["lio = drivers.export.lio:LioExport"],
        "virtman.drivers.snapshot": [
            "dmsnapshot = drivers.snapshot.dmsnapshot:DmSnapshotDisks",
            "dmthin = drivers.snapshot.dmthin:DmThinDisks",
            "qcow2 = drivers.snapshot.qcow2:Qcow2Disks",
        ],
        "virtman.drivers.transfer": [
            "auto = drivers.transfer.probe:Probe",
            "bittorrent = drivers.transfer.bittorrent:BittorrentTransfer",
            "udpcast = drivers.transfer.udpcast:UdpcastTransfer",
            "uftp = drivers.transfer.uftp:UftpTransfer",
        ],
    },
)
