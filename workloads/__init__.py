"""Requests to serve: trace readers, generators, length predictors, and the one table that they all fill."""

if not __name__.startswith("fleetpilot."):
    raise ImportError("import fleetpilot.workloads, not workloads")

from fleetpilot.workloads.arrivals import MMPP as MMPP
from fleetpilot.workloads.arrivals import Diurnal as Diurnal
from fleetpilot.workloads.arrivals import Gamma as Gamma
from fleetpilot.workloads.arrivals import PiecewiseRate as PiecewiseRate
from fleetpilot.workloads.arrivals import Poisson as Poisson
from fleetpilot.workloads.arrivals import Weibull as Weibull
from fleetpilot.workloads.arrivals import Windows as Windows
from fleetpilot.workloads.arrivals import burstiness_from_cv as burstiness_from_cv
from fleetpilot.workloads.arrivals import cv_from_burstiness as cv_from_burstiness
from fleetpilot.workloads.arrivals import rate_sweep as rate_sweep
from fleetpilot.workloads.clients import read_servegen as read_servegen
from fleetpilot.workloads.lengths import Empirical as Empirical
from fleetpilot.workloads.lengths import Fixed as Fixed
from fleetpilot.workloads.lengths import Geometric as Geometric
from fleetpilot.workloads.lengths import Independent as Independent
from fleetpilot.workloads.lengths import LlumnixZipf as LlumnixZipf
from fleetpilot.workloads.lengths import LogNormal as LogNormal
from fleetpilot.workloads.lengths import Quantiles as Quantiles
from fleetpilot.workloads.lengths import Uniform as Uniform
from fleetpilot.workloads.lengths import Zipf as Zipf
from fleetpilot.workloads.library import list_workloads as list_workloads
from fleetpilot.workloads.library import parse_workload as parse_workload
from fleetpilot.workloads.library import stream as stream
from fleetpilot.workloads.library import workload as workload
from fleetpilot.workloads.llumnix import llumnix_workload as llumnix_workload
from fleetpilot.workloads.openloop import Client as Client
from fleetpilot.workloads.openloop import OpenLoop as OpenLoop
from fleetpilot.workloads.predictors import ClassMean as ClassMean
from fleetpilot.workloads.predictors import Constant as Constant
from fleetpilot.workloads.predictors import GlobalMean as GlobalMean
from fleetpilot.workloads.predictors import LogNormalError as LogNormalError
from fleetpilot.workloads.predictors import with_predictions as with_predictions
from fleetpilot.workloads.prefix_tree import infinite_cache_hit as infinite_cache_hit
from fleetpilot.workloads.readers import detect_format as detect_format
from fleetpilot.workloads.readers import read_summary as read_summary
from fleetpilot.workloads.readers import read_trace as read_trace
from fleetpilot.workloads.sessions import Sessions as Sessions
from fleetpilot.workloads.table import RequestTable as RequestTable
from fleetpilot.workloads.table import make_table as make_table
from fleetpilot.workloads.twins import twin as twin
from fleetpilot.workloads.writers import write_mooncake as write_mooncake
from fleetpilot.workloads.writers import write_vidur as write_vidur
