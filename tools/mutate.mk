# The extension of one tree with every object apart, so that a change in one source is built in a
# second. tools/mutate.py runs it in a copy. Wanted: CFLAGS_PYTHON, and obj/_native.c to be there.
CFLAGS := -std=c11 -O2 -fno-math-errno -fPIC -w -pthread -DPy_LIMITED_API=0x030A0000 -Inative $(CFLAGS_PYTHON)
OBJECTS := obj/_native.o $(patsubst native/%.c,obj/%.o,$(wildcard native/*.c))

lossycoll/_native.abi3.so: $(OBJECTS)
	$(CC) -shared -pthread $^ -o $@

obj/%.o: native/%.c
	$(CC) $(CFLAGS) -MMD -MP -c $< -o $@
obj/_native.o: obj/_native.c
	$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

-include $(wildcard obj/*.d)
