"""Performs: commands of users, reports of agents, and the tick that turns plans into effects, intent first."""
