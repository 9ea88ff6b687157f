"""What loss costs a GPT of many parameters, whose replicas train in turn on one device."""
