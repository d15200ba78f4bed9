"""From a module to stages: Dynamo capture, deferred outputs, and the loss a micro-batch at a time."""
