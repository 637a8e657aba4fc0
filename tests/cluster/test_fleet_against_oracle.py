"""Migration, lifecycle, failures and pools in the kernel against the second model of tests/oracle_fleet.py."""

import numpy as np
from comparison import assert_bitwise_equal
from fleet_comparison import FleetCase, assert_same_run, run_kernel_fleet
from hypothesis import given
from strategies import fleets, fleets_on_grid, pools, pools_on_grid, shared_caches, speculating

ANY_FLEET = fleets() | fleets_on_grid() | pools() | pools_on_grid() | shared_caches() | speculating()


@given(fleets())
def test_requests_migrations_and_bills_equal_the_oracle(case: FleetCase) -> None:
    assert_same_run(case)


@given(fleets_on_grid())
def test_ties_equal_the_oracle(case: FleetCase) -> None:
    assert_same_run(case)


@given(pools())
def test_hand_overs_equal_the_oracle(case: FleetCase) -> None:
    assert_same_run(case)


@given(pools_on_grid())
def test_ties_with_pools_equal_the_oracle(case: FleetCase) -> None:
    assert_same_run(case)


@given(shared_caches())
def test_loads_from_a_shared_cache_equal_the_oracle(case: FleetCase) -> None:
    assert_same_run(case)


@given(speculating())
def test_speculative_decoding_equals_the_oracle(case: FleetCase) -> None:
    assert_same_run(case)


@given(ANY_FLEET)
def test_rejections_equal_the_oracle(case: FleetCase) -> None:
    assert_same_run(case, reject_share=0.3)
    run_kernel_fleet(case, leap=True, check=True, reject_share=0.3)


@given(ANY_FLEET)
def test_leaps_equal_single_steps_bitwise(case: FleetCase) -> None:
    leaping, asked = run_kernel_fleet(case, leap=True)
    stepping, asked_stepping = run_kernel_fleet(case, leap=False)
    assert asked.questions == asked_stepping.questions
    for name in leaping.migrations.dtype.names:
        np.testing.assert_array_equal(leaping.migrations[name], stepping.migrations[name], name)
    assert_bitwise_equal(leaping, stepping)


@given(ANY_FLEET)
def test_conservation(case: FleetCase) -> None:
    run_kernel_fleet(case, leap=True, check=True)
