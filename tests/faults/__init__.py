"""Faults: servers that stall, cut, lie, throttle and change objects; each test asserts the error and the state afterwards."""
