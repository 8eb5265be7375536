/* Runs an integer-only network that `qsdk to-integer --firmware network.h` has written: C99, no dependencies, no heap.

   Reads the codes of all inputs of an image from standard input, one input after the other in the header's order and
   type, and writes the codes of all outputs; then the next image, until the input ends. Bytes are in the order of the
   machine. */

#include <stddef.h>
#include <stdio.h>

#include "network.h"

int main(void)
{
    for (;;) {
        size_t read = 0, wanted = 0;
        for (int k = 0; k < QSDK_INPUTS; k++) {
            read += fread(qsdk_inputs[k].data, 1, (size_t)qsdk_inputs[k].bytes, stdin);
            wanted += (size_t)qsdk_inputs[k].bytes;
        }
        if (read != wanted || read == 0) {
            if (read != 0 || ferror(stdin)) {
                fprintf(stderr, "the input ends inside an image: %lu of %lu bytes\n", (unsigned long)read,
                        (unsigned long)wanted);
                return 1;
            }
            return 0;
        }
        qsdk_run();
        for (int k = 0; k < QSDK_OUTPUTS; k++) {
            size_t bytes = (size_t)qsdk_outputs[k].bytes;
            if (fwrite(qsdk_outputs[k].data, 1, bytes, stdout) != bytes) {
                fprintf(stderr, "the output cannot be written\n");
                return 1;
            }
        }
    }
}
