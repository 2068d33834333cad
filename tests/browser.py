"""A real browser, for pages that people look at."""

import shutil
import subprocess
from pathlib import Path

import pytest


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        pytest.skip("needs a browser: chromium is not installed")
    return found


def browse(url: str, profile: Path, size: str, *further: str) -> str:
    """Loads a page, waits for what its scripts do in the first seconds, and returns its document."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=4500 --dump-dom".split()
    )
    command = [chromium(), *flags, *further, f"--user-data-dir={profile}", f"--window-size={size}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
