"""The HTTP side: routes, live streams, who may do what. Built by wiring around one controller."""
