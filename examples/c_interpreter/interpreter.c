/* Runs an integer-only network that `qsdk to-integer --firmware network.h` has written: C99, no dependencies, no heap.

   Reads the codes of all inputs of an image from standard input, one input after the other in the header's order and
   type, and writes the codes of all outputs; then the next image, until the input ends. Bytes are in the order of the
   machine. Every number here is an integer; a tensor is either constant or lies in one static arena. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "network.h"

static union {
    int64_t alignment;
    uint8_t bytes[QSDK_ARENA_BYTES];
} arena;

/* --- tensors ---------------------------------------------------------------------------------------------------- */

static const size_t type_bytes[] = {1, 1, 2, 2, 4, 4, 8};

static const void *read_place(const struct qsdk_tensor *tensor)
{
    return tensor->constant ? tensor->constant : (const void *)(arena.bytes + tensor->offset);
}

static void *write_place(const struct qsdk_tensor *tensor)
{
    return arena.bytes + tensor->offset;
}

static size_t bytes_of(const struct qsdk_tensor *tensor)
{
    return tensor->elements * type_bytes[tensor->type];
}

static int64_t load(const struct qsdk_tensor *tensor, size_t i)
{
    const void *data = read_place(tensor);
    switch (tensor->type) {
    case QSDK_UINT8: return ((const uint8_t *)data)[i];
    case QSDK_INT8: return ((const int8_t *)data)[i];
    case QSDK_UINT16: return ((const uint16_t *)data)[i];
    case QSDK_INT16: return ((const int16_t *)data)[i];
    case QSDK_UINT32: return ((const uint32_t *)data)[i];
    case QSDK_INT32: return ((const int32_t *)data)[i];
    case QSDK_INT64: break;
    }
    return ((const int64_t *)data)[i];
}

static void store(const struct qsdk_tensor *tensor, size_t i, int64_t value)
{
    void *data = write_place(tensor);
    switch (tensor->type) {
    case QSDK_UINT8: ((uint8_t *)data)[i] = (uint8_t)value; return;
    case QSDK_INT8: ((int8_t *)data)[i] = (int8_t)value; return;
    case QSDK_UINT16: ((uint16_t *)data)[i] = (uint16_t)value; return;
    case QSDK_INT16: ((int16_t *)data)[i] = (int16_t)value; return;
    case QSDK_UINT32: ((uint32_t *)data)[i] = (uint32_t)value; return;
    case QSDK_INT32: ((int32_t *)data)[i] = (int32_t)value; return;
    case QSDK_INT64: ((int64_t *)data)[i] = value; return;
    }
}

/* A position in a tensor of the shape of `shape`, counted up with the last axis first. */
struct position {
    const struct qsdk_tensor *shape;
    int32_t index[QSDK_RANK];
};

static void step(struct position *at)
{
    int32_t axis;
    for (axis = at->shape->rank - 1; axis >= 0; axis--) {
        if (++at->index[axis] < at->shape->dims[axis]) {
            return;
        }
        at->index[axis] = 0;
    }
}

static size_t offset_at(const struct position *at, const int32_t *strides)
{
    ptrdiff_t sum = 0;
    int32_t axis;
    for (axis = 0; axis < at->shape->rank; axis++) {
        sum += (ptrdiff_t)at->index[axis] * strides[axis];
    }
    return (size_t)sum;
}

/* Strides that read a tensor as if it had the shape `to`: axes are aligned at the end, and size 1 is repeated. The last
   `kept` axes of both get the stride 0; gives the elements that they span. */
static int32_t broadcast(const struct qsdk_tensor *tensor, const struct qsdk_tensor *to, int32_t kept, int32_t *strides)
{
    int32_t axis, span = 1, size = 1;
    for (axis = 1; axis <= to->rank; axis++) {
        int32_t dim = axis <= tensor->rank ? tensor->dims[tensor->rank - axis] : 1;
        strides[to->rank - axis] = dim == 1 || axis <= kept ? 0 : size;
        size *= dim;
        span *= axis <= kept ? dim : 1;
    }
    return span;
}

/* --- requantization --------------------------------------------------------------------------------------------- */

/* floor(p / 2**n); C leaves the right shift of a negative number to the compiler. */
static int64_t shifted(int64_t p, int n)
{
    return p >= 0 ? p >> n : ~(~p >> n);
}

static int64_t round_shift(int64_t p, int n, enum qsdk_rounding rounding)
{
    int64_t whole, rest, half = (int64_t)1 << (n - 1);
    int up;
    if (rounding == QSDK_GEMMLOWP) { /* by at most 31 bits half up, then by the others half away */
        p = round_shift(p, n < 31 ? n : 31, QSDK_HALF_UP);
        return n > 31 ? round_shift(p, n - 31, QSDK_HALF_AWAY) : p;
    }
    whole = shifted(p, n);
    rest = p - whole * ((int64_t)1 << n);
    up = rounding == QSDK_HALF_EVEN ? whole % 2 != 0 : rounding == QSDK_HALF_UP ? 1 : whole >= 0;
    return whole + (rest > half || (rest == half && up));
}

static int64_t clamp(int64_t value, int64_t lo, int64_t hi)
{
    return value < lo ? lo : value > hi ? hi : value;
}

/* Inputs: the terms, their mantissas, the shift, the addend. */
static int64_t product_64(const struct qsdk_op *op, const int64_t *value)
{
    int64_t addend = value[2 * op->terms + 1], product = addend;
    int32_t k;
    if (op->bias_first) {
        return (value[0] + addend) * value[op->terms];
    }
    for (k = 0; k < op->terms; k++) {
        product += value[k] * value[op->terms + k];
    }
    return product;
}

static int32_t half_up_32(int32_t value, int32_t shift)
{
    return shift == 0 ? value : (int32_t)shifted(value + ((int32_t)1 << (shift - 1)), shift);
}

/* Inputs: the terms, their mantissas, zeros, cuts and shifts in front of the product, the shift, the addend. Everything
   is proven to stay in int32. */
static int32_t product_32(const struct qsdk_op *op, const int64_t *value)
{
    int32_t terms = op->terms, product = (int32_t)value[5 * terms + 1], k;
    for (k = 0; k < terms; k++) {
        int32_t mantissa = (int32_t)value[terms + k], cut = (int32_t)value[3 * terms + k];
        int32_t term = (int32_t)value[k] - (int32_t)value[2 * terms + k];
        if (cut > 0) {
            term = term < -cut ? -cut : term > cut ? cut : term;
        }
        product += half_up_32(term, (int32_t)value[4 * terms + k]) * mantissa;
    }
    return product;
}

static void requantize(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    int32_t strides[QSDK_OP_INPUTS][QSDK_RANK];
    struct position at = {out, {0}};
    size_t i;
    int32_t k;
    for (k = 0; k < op->count; k++) {
        broadcast(&qsdk_tensors[op->inputs[k]], out, 0, strides[k]);
    }
    for (i = 0; i < out->elements; i++, step(&at)) {
        int64_t value[QSDK_OP_INPUTS], rounded;
        for (k = 0; k < op->count; k++) {
            value[k] = load(&qsdk_tensors[op->inputs[k]], offset_at(&at, strides[k]));
        }
        if (op->kind == QSDK_REQUANTIZE_32) {
            rounded = half_up_32(product_32(op, value), (int32_t)value[op->count - 2]);
        } else {
            rounded = round_shift(product_64(op, value), (int)value[op->count - 2], op->rounding);
        }
        store(out, i, clamp(rounded + op->code_zero_point, op->lo, op->hi));
    }
}

/* --- windows ---------------------------------------------------------------------------------------------------- */

/* The size of a spatial axis (0..2) of a tensor (batch, channels, up to 3 axes); missing axes in front are of size 1. */
static int32_t spatial(const struct qsdk_tensor *tensor, int32_t axis)
{
    int32_t i = tensor->rank - 3 + axis;
    return i < 2 ? 1 : tensor->dims[i];
}

/* The taps of a window that lie inside the image, axis by axis: first <= k < last. */
struct taps {
    int32_t corner[3], first[3], last[3];
};

static struct taps taps_at(const struct qsdk_op *op, const struct qsdk_tensor *in, const int32_t *place)
{
    struct taps taps;
    int32_t axis;
    for (axis = 0; axis < 3; axis++) {
        int32_t corner = place[axis] * op->stride[axis] - op->pad[axis], dilation = op->dilation[axis];
        int32_t room = spatial(in, axis) - corner, last = room <= 0 ? 0 : (room - 1) / dilation + 1;
        taps.corner[axis] = corner;
        taps.first[axis] = corner < 0 ? (dilation - 1 - corner) / dilation : 0;
        taps.last[axis] = last < op->kernel[axis] ? last : op->kernel[axis];
    }
    return taps;
}

/* One window of one channel of codes: the sum with a weight or without, or the largest code. Codes are uint8 here, and
   weights int8 or, where their zero points leave that range, int16. */
static int64_t window(const struct qsdk_op *op, const struct qsdk_tensor *in, size_t plane,
                      const struct qsdk_tensor *weight, size_t tap, const struct taps *taps)
{
    const uint8_t *codes = (const uint8_t *)read_place(in) + plane;
    const int8_t *narrow = weight && weight->type == QSDK_INT8 ? (const int8_t *)weight->constant + tap : NULL;
    const int16_t *wide = weight && !narrow ? (const int16_t *)weight->constant + tap : NULL;
    int32_t k[3], zero_point = op->zero_point[0], largest = 0, height = spatial(in, 1), width = spatial(in, 2);
    int64_t sum = 0;
    for (k[0] = taps->first[0]; k[0] < taps->last[0]; k[0]++) {
        int32_t depth_at = (taps->corner[0] + k[0] * op->dilation[0]) * height;
        for (k[1] = taps->first[1]; k[1] < taps->last[1]; k[1]++) {
            const uint8_t *row = codes + (size_t)(depth_at + taps->corner[1] + k[1] * op->dilation[1]) * (size_t)width;
            int32_t t = (k[0] * op->kernel[1] + k[1]) * op->kernel[2];
            for (k[2] = taps->first[2]; k[2] < taps->last[2]; k[2]++) {
                int32_t code = row[taps->corner[2] + k[2] * op->dilation[2]], value = code - zero_point;
                sum += narrow ? value * narrow[t + k[2]] : wide ? value * wide[t + k[2]] : value;
                largest = code > largest ? code : largest;
            }
        }
    }
    return op->kind == QSDK_MAX_POOL ? largest : sum;
}

/* CONV, WINDOW_SUM and MAX_POOL: of the last two, every channel is a group of its own. */
static void windows(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    const struct qsdk_tensor *in = &qsdk_tensors[op->inputs[0]];
    const struct qsdk_tensor *weight = op->kind == QSDK_CONV ? &qsdk_tensors[op->inputs[1]] : NULL;
    int32_t depth = weight ? weight->dims[1] : 1, filters = out->dims[1];
    int32_t taps = op->kernel[0] * op->kernel[1] * op->kernel[2], per_group = weight ? filters / op->group : 1;
    size_t image = (size_t)spatial(in, 0) * (size_t)spatial(in, 1) * (size_t)spatial(in, 2), i = 0;
    int32_t n, f, c, o[3];
    for (n = 0; n < out->dims[0]; n++) {
        for (f = 0; f < filters; f++) {
            int32_t first = f / per_group * depth;
            for (o[0] = 0; o[0] < spatial(out, 0); o[0]++) {
                for (o[1] = 0; o[1] < spatial(out, 1); o[1]++) {
                    for (o[2] = 0; o[2] < spatial(out, 2); o[2]++) {
                        struct taps inside = taps_at(op, in, o);
                        int64_t sum = 0;
                        for (c = 0; c < depth; c++) {
                            size_t plane = (size_t)(n * in->dims[1] + first + c) * image;
                            sum += window(op, in, plane, weight, (size_t)(f * depth + c) * (size_t)taps, &inside);
                        }
                        store(out, i++, sum);
                    }
                }
            }
        }
    }
}

/* --- the other kinds -------------------------------------------------------------------------------------------- */

static void matmul(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    const struct qsdk_tensor *a = &qsdk_tensors[op->inputs[0]], *b = &qsdk_tensors[op->inputs[1]];
    int32_t a_strides[QSDK_RANK], b_strides[QSDK_RANK], depth = a->dims[a->rank - 1], columns = b->dims[b->rank - 1], k;
    struct position at = {out, {0}};
    size_t i;
    broadcast(a, out, 2, a_strides);
    broadcast(b, out, 2, b_strides);
    a_strides[out->rank - 2] = depth;
    b_strides[out->rank - 1] = 1;
    for (i = 0; i < out->elements; i++, step(&at)) {
        size_t left = offset_at(&at, a_strides), right = offset_at(&at, b_strides);
        int64_t sum = 0;
        for (k = 0; k < depth; k++) {
            sum += (load(a, left + (size_t)k) - op->zero_point[0])
                   * (load(b, right + (size_t)k * (size_t)columns) - op->zero_point[1]);
        }
        store(out, i, sum);
    }
}

static int64_t combined(const struct qsdk_op *op, int64_t x, int64_t y)
{
    switch (op->kind) {
    case QSDK_ADD: return x + y;
    case QSDK_SUBTRACT: return x - y;
    case QSDK_MULTIPLY: return (x - op->zero_point[0]) * (y - op->zero_point[1]);
    case QSDK_AND: return x & y;
    case QSDK_MAXIMUM: return x > y ? x : y;
    case QSDK_MINIMUM: return x < y ? x : y;
    default: return shifted(x, (int)y);
    }
}

static void elementwise(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    int32_t strides[QSDK_OP_INPUTS][QSDK_RANK], k;
    struct position at = {out, {0}};
    size_t i;
    for (k = 0; k < op->count; k++) {
        broadcast(&qsdk_tensors[op->inputs[k]], out, 0, strides[k]);
    }
    for (i = 0; i < out->elements; i++, step(&at)) {
        int64_t value = load(&qsdk_tensors[op->inputs[0]], offset_at(&at, strides[0]));
        for (k = 1; k < op->count; k++) {
            value = combined(op, value, load(&qsdk_tensors[op->inputs[k]], offset_at(&at, strides[k])));
        }
        store(out, i, value);
    }
}

/* CLIP, CAST and TABLE. */
static void map(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    const struct qsdk_tensor *in = &qsdk_tensors[op->inputs[0]];
    size_t i;
    for (i = 0; i < out->elements; i++) {
        int64_t value = load(in, i);
        if (op->kind == QSDK_CLIP) {
            value = clamp(value, op->lo, op->hi);
        } else if (op->kind == QSDK_TABLE) {
            value = load(&qsdk_tensors[op->inputs[1]], (size_t)value);
        }
        store(out, i, value);
    }
}

/* Straight lines instead of a table of 16-bit codes; everything is proven to stay in int32. */
static void interpolate(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    const struct qsdk_tensor *in[5];
    size_t i;
    int32_t k;
    for (k = 0; k < 5; k++) {
        in[k] = &qsdk_tensors[op->inputs[k]];
    }
    for (i = 0; i < out->elements; i++) {
        int32_t code = (int32_t)load(in[0], i), rest = code & 255, bits = (int32_t)load(in[1], (size_t)(code >> 8));
        size_t segment = (size_t)(load(in[2], (size_t)(code >> 8)) + (rest >> bits));
        int32_t base = (int32_t)load(in[3], segment), slope = (int32_t)load(in[4], segment);
        int32_t line = base + slope * (rest & ((1 << bits) - 1));
        store(out, i, clamp(line, 0, op->hi << op->fraction) >> op->fraction);
    }
}

/* AXIS_SUM and AXIS_MAX: the output is read as if the reduced axes had stayed, with size 1. */
static const int64_t least[] = {0, INT8_MIN, 0, INT16_MIN, 0, INT32_MIN, INT64_MIN};

static void reduce(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    const struct qsdk_tensor *in = &qsdk_tensors[op->inputs[0]];
    struct position at = {in, {0}};
    int32_t strides[QSDK_RANK], axis, size = 1;
    size_t i;
    for (axis = in->rank - 1; axis >= 0; axis--) {
        strides[axis] = op->reduced[axis] ? 0 : size;
        size *= op->reduced[axis] ? 1 : in->dims[axis];
    }
    for (i = 0; i < out->elements; i++) {
        store(out, i, op->kind == QSDK_AXIS_SUM ? 0 : least[out->type]);
    }
    for (i = 0; i < in->elements; i++, step(&at)) {
        size_t to = offset_at(&at, strides);
        int64_t value = load(in, i) - op->zero_point[0], old = load(out, to);
        store(out, to, op->kind == QSDK_AXIS_SUM ? old + value : value > old ? value : old);
    }
}

static void concat(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    size_t inner = type_bytes[out->type], outer = 1, row, done = 0;
    int32_t axis, k;
    for (axis = 0; axis < out->rank; axis++) {
        if (axis < op->axis) {
            outer *= (size_t)out->dims[axis];
        } else if (axis > op->axis) {
            inner *= (size_t)out->dims[axis];
        }
    }
    for (k = 0; k < op->count; k++) {
        const struct qsdk_tensor *in = &qsdk_tensors[op->inputs[k]];
        size_t width = inner * (size_t)in->dims[op->axis], stride = inner * (size_t)out->dims[op->axis];
        for (row = 0; row < outer; row++) {
            memcpy((uint8_t *)write_place(out) + row * stride + done, (const uint8_t *)read_place(in) + row * width, width);
        }
        done += width;
    }
}

/* COPY, STRIDED and GATHER. */
static void move(const struct qsdk_op *op, const struct qsdk_tensor *out)
{
    const struct qsdk_tensor *in = &qsdk_tensors[op->inputs[0]];
    struct position at = {out, {0}};
    size_t i;
    if (op->kind == QSDK_COPY) {
        memcpy(write_place(out), read_place(in), bytes_of(out));
        return;
    }
    for (i = 0; i < out->elements; i++, step(&at)) {
        int64_t from = op->kind == QSDK_STRIDED ? (int64_t)(offset_at(&at, op->step) + (size_t)op->start)
                                                : load(&qsdk_tensors[op->inputs[1]], i);
        store(out, i, from < 0 ? op->fill : load(in, (size_t)from));
    }
}

static void execute(const struct qsdk_op *op)
{
    const struct qsdk_tensor *out = &qsdk_tensors[op->output];
    switch (op->kind) {
    case QSDK_CONV: case QSDK_WINDOW_SUM: case QSDK_MAX_POOL: windows(op, out); break;
    case QSDK_MATMUL: matmul(op, out); break;
    case QSDK_REQUANTIZE: case QSDK_REQUANTIZE_32: requantize(op, out); break;
    case QSDK_AXIS_SUM: case QSDK_AXIS_MAX: reduce(op, out); break;
    case QSDK_TABLE: case QSDK_CLIP: case QSDK_CAST: map(op, out); break;
    case QSDK_INTERPOLATE: interpolate(op, out); break;
    case QSDK_CONCAT: concat(op, out); break;
    case QSDK_COPY: case QSDK_STRIDED: case QSDK_GATHER: move(op, out); break;
    case QSDK_ADD: case QSDK_SUBTRACT: case QSDK_MULTIPLY: case QSDK_AND: case QSDK_SHIFT_RIGHT:
    case QSDK_MAXIMUM: case QSDK_MINIMUM:
        elementwise(op, out);
        break;
    case QSDK_KINDS: break;
    }
}

int main(void)
{
    for (;;) {
        int32_t k;
        size_t read = 0, wanted = 0;
        for (k = 0; k < QSDK_INPUTS; k++) {
            const struct qsdk_tensor *in = &qsdk_tensors[qsdk_inputs[k].tensor];
            read += fread(write_place(in), 1, bytes_of(in), stdin);
            wanted += bytes_of(in);
        }
        if (read == 0 || read != wanted) {
            if (read != 0 || ferror(stdin)) {
                fprintf(stderr, "the input ends inside an image: %lu of %lu bytes\n", (unsigned long)read,
                        (unsigned long)wanted);
                return 1;
            }
            return 0;
        }
        for (k = 0; k < QSDK_OPS; k++) {
            execute(&qsdk_ops[k]);
        }
        for (k = 0; k < QSDK_OUTPUTS; k++) {
            const struct qsdk_tensor *out = &qsdk_tensors[qsdk_outputs[k].tensor];
            if (fwrite(read_place(out), 1, bytes_of(out), stdout) != bytes_of(out)) {
                fprintf(stderr, "the output cannot be written\n");
                return 1;
            }
        }
    }
}
