"""What of MemScale works on this machine: `doctor` says what is there, `selftest` tries it."""

from memscale.diagnosis.checks import SelfTest, selftest
from memscale.diagnosis.environment import Finding, doctor

__all__ = ["Finding", "SelfTest", "doctor", "selftest"]
