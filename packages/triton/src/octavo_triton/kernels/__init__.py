"""What runs on the device: functions of Triton, compiled for a GPU or interpreted on a CPU.

Values are rounded in integer arithmetic on their bits, or by instructions of the chip that make the same bits, because
Triton's own casts differ from GPU to GPU and from the interpreter. bfloat16 arrays are passed as int16, whose bits are
theirs: the interpreter keeps bfloat16 as integers and would multiply these.
"""
