"""What everything else stands on: values and protocols, linear algebra, draws, statuses."""
