"""Membership of groups: rendezvous, failure detection, coordinator, views."""
