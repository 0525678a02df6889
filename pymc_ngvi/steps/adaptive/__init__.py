"""The default step rule: no learning rate, few draws, a stop rule in nats."""
