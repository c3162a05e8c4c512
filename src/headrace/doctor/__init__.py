"""What may be wrong between this machine and a model's files, found step by step: name, network, TLS, clock, credentials, reads, speed, cache. Prints nothing."""

from headrace.doctor.aftermath import Advice, advise, is_explained
from headrace.doctor.examination import Examination, Limits, Plan
from headrace.doctor.finding import Finding, State
from headrace.doctor.report import Report, lines_of
from headrace.doctor.world import World

__all__ = [
    "Advice",
    "Examination",
    "Finding",
    "Limits",
    "Plan",
    "Report",
    "State",
    "World",
    "advise",
    "is_explained",
    "lines_of",
]
