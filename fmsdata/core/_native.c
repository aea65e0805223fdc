/* The inner loops of planning and copying, compiled.
 *
 * Each function has a twin in Python, next to the place that calls it, and gives the same result to the last bit.
 * The package works without this module: see native.py. Arrays come as contiguous buffers, and every length and
 * index that leads to memory is checked here.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(struct iovec) == 16, "pieces of memory are pairs of 64-bit integers");

enum { VERSION = 2 }; /* as in native.py, which refuses another build: it grows with every change of this file */

/* Names of attributes. */
static PyObject *AT_ONCE, *STAMP, *TOKENS, *DTYPE, *ADDRESS, *LENGTH_NAME, *ITEMSIZE, *SOURCE, *KIND, *ISNATIVE;

/* The columns of spans, as in spans.py. */
enum { BUFFER, START, LENGTH, DOCUMENT, POSITION, BEGINS, TAIL, COLUMNS };

enum { MOST_ARRAYS = 64 };

/* The arrays that a function was called with. */
typedef struct {
    Py_buffer views[MOST_ARRAYS];
    int count;
} Arrays;

static void release(Arrays *arrays) {
    while (arrays->count) PyBuffer_Release(&arrays->views[--arrays->count]);
}

/* The memory of an array, and how many elements it has; NULL with an exception if it is of another kind. */
static void *array(Arrays *arrays, PyObject *object, Py_ssize_t width, int writable, Py_ssize_t *count) {
    if (arrays->count == MOST_ARRAYS) {
        PyErr_SetString(PyExc_RuntimeError, "too many arrays");
        return NULL;
    }
    Py_buffer *view = &arrays->views[arrays->count];
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_CONTIG | PyBUF_FORMAT : PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0)
        return NULL;
    arrays->count++;
    if (view->itemsize != width) {
        PyErr_Format(PyExc_ValueError, "array of items of %zd bytes, expected %zd", view->itemsize, width);
        return NULL;
    }
    *count = view->len / width;
    return view->buf;
}

static PyObject *failed(Arrays *arrays, const char *message) {
    release(arrays);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

static int counted(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return 1;
    PyErr_Format(PyExc_ValueError, "expected %zd arguments, got %zd", expected, given);
    return 0;
}

/* The splitmix64 finalizer, as in keys.py. */
static inline uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* BLAKE2b with a digest of 8 bytes (RFC 7693). */

static const uint64_t IV[8] = {0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
                               0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u};
static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
enum { BLAKE_BLOCK = 128, DIGEST = 8 };

static inline uint64_t turned(uint64_t x, int bits) {
    return x >> bits | x << (64 - bits);
}

static void compress(uint64_t h[8], const uint8_t block[BLAKE_BLOCK], uint64_t bytes, int last) {
    uint64_t v[16], m[16];
    for (int i = 0; i < 16; i++) {
        m[i] = 0;
        for (int byte = 0; byte < 8; byte++) m[i] |= (uint64_t)block[8 * i + byte] << 8 * byte;
    }
    memcpy(v, h, 64);
    memcpy(v + 8, IV, 64);
    v[12] ^= bytes;
    if (last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round % 10];
#define G(i, a, b, c, d)                                                                                               \
    v[a] += v[b] + m[s[2 * i]], v[d] = turned(v[d] ^ v[a], 32), v[c] += v[d], v[b] = turned(v[b] ^ v[c], 24),          \
                                v[a] += v[b] + m[s[2 * i + 1]], v[d] = turned(v[d] ^ v[a], 16), v[c] += v[d],          \
                                v[b] = turned(v[b] ^ v[c], 63)
        G(0, 0, 4, 8, 12), G(1, 1, 5, 9, 13), G(2, 2, 6, 10, 14), G(3, 3, 7, 11, 15);
        G(4, 0, 5, 10, 15), G(5, 1, 6, 11, 12), G(6, 2, 7, 8, 13), G(7, 3, 4, 9, 14);
#undef G
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

static uint64_t digest(const uint8_t *text, size_t size) {
    uint64_t h[8], bytes = 0;
    memcpy(h, IV, 64);
    h[0] ^= 0x01010000 ^ DIGEST;
    for (; size > BLAKE_BLOCK; text += BLAKE_BLOCK, size -= BLAKE_BLOCK) compress(h, text, bytes += BLAKE_BLOCK, 0);
    uint8_t block[BLAKE_BLOCK] = {0};
    memcpy(block, text, size);
    compress(h, block, bytes + size, 1);
    return h[0];
}

/* Write a number behind a text, as "%lld" would. Returns the end. */
static uint8_t *write_number(uint8_t *end, int64_t number) {
    uint8_t digits[20];
    int count = 0;
    uint64_t left = number < 0 ? -(uint64_t)number : (uint64_t)number;
    do digits[count++] = (uint8_t)('0' + left % 10);
    while (left /= 10);
    if (number < 0) *end++ = '-';
    while (count) *end++ = digits[--count];
    return end;
}

/* keys_of(prefix, numbers, out): the digest of the prefix and each number, followed by ")". */
static PyObject *keys_of(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 3)) return NULL;
    Arrays arrays = {.count = 0};
    Py_ssize_t size, count, places;
    const uint8_t *prefix = array(&arrays, args[0], 1, 0, &size);
    const int64_t *numbers = prefix ? array(&arrays, args[1], 8, 0, &count) : NULL;
    uint64_t *out = numbers ? array(&arrays, args[2], 8, 1, &places) : NULL;
    if (!out || places != count) return failed(&arrays, "keys_of: arrays of different lengths");
    uint8_t *text = malloc((size_t)size + 32);
    if (!text) return release(&arrays), PyErr_NoMemory();
    memcpy(text, prefix, (size_t)size);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint8_t *end = write_number(text + size, numbers[i]);
        *end++ = ')';
        out[i] = digest(text, (size_t)(end - text));
    }
    free(text);
    release(&arrays);
    Py_RETURN_NONE;
}

/* Sort keys. Their upper bits are random, so almost all end up in place by those alone. */
static int sort_keys(uint64_t *keys, Py_ssize_t count) {
    if (count > 24) {
        int bits = 4;
        while (bits < 16 && (Py_ssize_t)1 << bits < count) bits++;
        uint32_t *ends = calloc((size_t)1 << bits, sizeof *ends);
        uint64_t *copy = malloc((size_t)count * sizeof *copy);
        if (!ends || !copy) return free(ends), free(copy), 0;
        memcpy(copy, keys, (size_t)count * sizeof *copy);
        for (Py_ssize_t i = 0; i < count; i++) ends[copy[i] >> (64 - bits)]++;
        uint32_t before = 0;
        for (Py_ssize_t i = 0; i < (Py_ssize_t)1 << bits; i++) {
            uint32_t here = ends[i];
            ends[i] = before;
            before += here;
        }
        for (Py_ssize_t i = 0; i < count; i++) keys[ends[copy[i] >> (64 - bits)]++] = copy[i];
        free(ends), free(copy);
    }
    for (Py_ssize_t i = 1; i < count; i++) {
        uint64_t key = keys[i];
        Py_ssize_t at = i;
        for (; at && keys[at - 1] > key; at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
    return 1;
}

/* The table of a shard: where each document starts, and its length. */
typedef struct {
    const int64_t *start, *length;
    const int32_t *narrow; /* instead of length */
    Py_ssize_t rows;
    int64_t buffer; /* of the epoch in hand, or -1 */
} Table;

/* Read the tables of all shards. Returns NULL with an exception. */
static Table *open_tables(Arrays *arrays, PyObject *starts, PyObject *lengths, Py_ssize_t *count) {
    if (!PyList_Check(starts) || !PyList_Check(lengths) || PyList_GET_SIZE(starts) != PyList_GET_SIZE(lengths))
        return PyErr_SetString(PyExc_ValueError, "in_order: lists of different lengths"), NULL;
    *count = PyList_GET_SIZE(starts);
    Table *tables = calloc((size_t)*count + 1, sizeof *tables);
    if (!tables) return PyErr_NoMemory(), NULL;
    for (Py_ssize_t i = 0; i < *count; i++) {
        /* numpy keeps the memory: the lists keep the arrays, and nothing else runs meanwhile */
        arrays->count = 0;
        Py_ssize_t rows = 0;
        tables[i].start = array(arrays, PyList_GET_ITEM(starts, i), 8, 0, &tables[i].rows);
        if (tables[i].start) {
            tables[i].length = array(arrays, PyList_GET_ITEM(lengths, i), 8, 0, &rows);
            if (!tables[i].length && PyErr_ExceptionMatches(PyExc_ValueError)) {
                PyErr_Clear();
                tables[i].narrow = array(arrays, PyList_GET_ITEM(lengths, i), 4, 0, &rows);
            }
        }
        int good = tables[i].length || tables[i].narrow;
        release(arrays);
        if (!good || rows != tables[i].rows) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "in_order: a table of different lengths");
            return free(tables), NULL;
        }
    }
    return tables;
}

/* in_order(prefix, epochs, numbers, addresses, shard, row, starts, lengths, place, visited, least, spans, positions):
 * the documents of blocks, block by block, each in the order of its key.
 *
 * Block b is documents addresses[b][1] to addresses[b][2] - 1 of a shard, which are rows from row[b] on of table
 * shard[b]: starts and lengths are lists of arrays. Its key is the digest of the prefix, its epoch and its number.
 * Fills in one span for each document that has the least length, and its position: the place of its block, and its
 * number in it. The first `visited` of the first block are left out. Returns how many spans there are, and the buffers
 * that they need, as pairs of an epoch and a table. */
static PyObject *in_order(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 13)) return NULL;
    Arrays arrays = {.count = 0}, scratch = {.count = 0};
    Py_ssize_t size, blocks, nnumbers, cells, nshard, nrow, nspans, npositions, ntables = 0;
    const uint8_t *prefix = array(&arrays, args[0], 1, 0, &size);
    const int64_t *epochs = prefix ? array(&arrays, args[1], 8, 0, &blocks) : NULL;
    const int64_t *numbers = epochs ? array(&arrays, args[2], 8, 0, &nnumbers) : NULL;
    const int64_t *addresses = numbers ? array(&arrays, args[3], 8, 0, &cells) : NULL;
    const int64_t *shard = addresses ? array(&arrays, args[4], 8, 0, &nshard) : NULL;
    const int64_t *row = shard ? array(&arrays, args[5], 8, 0, &nrow) : NULL;
    int64_t *spans = row ? array(&arrays, args[11], 8, 1, &nspans) : NULL;
    int64_t *positions = spans ? array(&arrays, args[12], 8, 1, &npositions) : NULL;
    if (!positions) return failed(&arrays, "");
    int64_t place = PyLong_AsLongLong(args[8]), visited = PyLong_AsLongLong(args[9]),
            least = PyLong_AsLongLong(args[10]);
    if (PyErr_Occurred()) return failed(&arrays, "");
    Py_ssize_t room = npositions / 2 - 1, kept = 0;
    int64_t most = 0, buffers = 0;
    if (cells != 3 * blocks || nnumbers != blocks || nshard != blocks || nrow != blocks || nspans / COLUMNS < room ||
        room < 0 || visited < 0)
        return failed(&arrays, "in_order: arrays of different lengths");
    for (Py_ssize_t b = 0; b < blocks; b++) {
        int64_t documents = addresses[3 * b + 2] - addresses[3 * b + 1];
        if (documents < 0 || documents > 1 << 16) return failed(&arrays, "in_order: no such block");
        if (documents > most) most = documents;
    }
    const char *problem = NULL;
    PyObject *pairs = PyList_New(0), *result = NULL;
    uint64_t *order = malloc((size_t)(most + 1) * sizeof *order);
    uint8_t *text = malloc((size_t)size + 64);
    Table *tables = pairs && order && text ? open_tables(&scratch, args[6], args[7], &ntables) : NULL;
    if (!tables) {
        problem = "in_order: no memory";
        goto end;
    }
    memcpy(text, prefix, (size_t)size);
    for (Py_ssize_t b = 0; b < blocks; b++) {
        int64_t first = addresses[3 * b + 1], documents = addresses[3 * b + 2] - first;
        if (!b || epochs[b] != epochs[b - 1])
            for (Py_ssize_t i = 0; i < ntables; i++) tables[i].buffer = -1;
        problem = "in_order: a block reaches beyond its table";
        if (shard[b] < 0 || shard[b] >= ntables) goto end;
        Table *table = &tables[shard[b]];
        if (row[b] < 0 || row[b] > table->rows || documents > table->rows - row[b] || documents > room - kept) goto end;
        problem = NULL;
        if (table->buffer < 0) {
            PyObject *pair = Py_BuildValue("(LL)", (long long)epochs[b], (long long)shard[b]);
            int good = pair && PyList_Append(pairs, pair) == 0;
            Py_XDECREF(pair);
            if (!good) goto end;
            table->buffer = buffers++;
        }
        order[0] = 0;
        if (documents > 1) {
            uint8_t *end = write_number(text + size, epochs[b]);
            *end++ = ',', *end++ = ' ';
            end = write_number(end, numbers[b]);
            *end++ = ')';
            uint64_t key = mix(digest(text, (size_t)(end - text)));
            for (int64_t i = 0; i < documents; i++) order[i] = mix((uint64_t)i ^ key) >> 16 << 16 | (uint64_t)i;
            if (!sort_keys(order, documents)) {
                problem = "in_order: no memory";
                goto end;
            }
        }
        for (int64_t rank = b ? 0 : visited; rank < documents; rank++) {
            int64_t i = order[rank] & 0xFFFF, at = row[b] + i;
            int64_t tokens = table->narrow ? table->narrow[at] : table->length[at];
            if (tokens < least) continue;
            int64_t *span = spans + COLUMNS * kept;
            span[BUFFER] = table->buffer, span[START] = table->start[at], span[LENGTH] = tokens;
            span[DOCUMENT] = first + i, span[POSITION] = 0, span[BEGINS] = 1, span[TAIL] = 0;
            positions[2 * kept] = place + b, positions[2 * kept + 1] = rank;
            kept++;
        }
    }
    positions[2 * kept] = place + blocks, positions[2 * kept + 1] = 0;
    result = Py_BuildValue("(nO)", kept, pairs);
end:
    free(order), free(text), free(tables);
    Py_XDECREF(pairs);
    return result ? (release(&arrays), result) : failed(&arrays, problem ? problem : "in_order: no memory");
}

/* Buffers of several chunks, and their places in one list: those that are used, in the order of first use. */
typedef struct {
    PyObject *list, *places;
} Buffers;

/* The place of a buffer; -1 with an exception. */
static int64_t place_of(Buffers *all, PyObject *buffer) {
    PyObject *place = PyDict_GetItemWithError(all->places, buffer);
    if (place) return PyLong_AsLongLong(place);
    Py_ssize_t next = PyList_GET_SIZE(all->list);
    if (PyErr_Occurred() || !(place = PyLong_FromSsize_t(next))) return -1;
    int good = PyDict_SetItem(all->places, buffer, place) == 0 && PyList_Append(all->list, buffer) == 0;
    Py_DECREF(place);
    return good ? next : -1;
}

/* A chunk that is read: its spans, and for each of its buffers the place in the union, or -1. */
typedef struct {
    const int64_t *spans;
    Py_ssize_t count;
    PyObject *buffers;
    int64_t *places;
    Py_buffer view;
} Part;

static void close_parts(Part *parts, Py_ssize_t count) {
    while (count--) {
        free(parts[count].places);
        PyBuffer_Release(&parts[count].view);
    }
    free(parts);
}

static Part *open_parts(PyObject *spans, PyObject *buffers, Py_ssize_t *count) {
    if (!PyList_Check(spans) || !PyList_Check(buffers) || PyList_GET_SIZE(spans) != PyList_GET_SIZE(buffers))
        return PyErr_SetString(PyExc_ValueError, "lists of different lengths"), NULL;
    Py_ssize_t all = PyList_GET_SIZE(spans);
    Part *parts = calloc((size_t)all + 1, sizeof *parts);
    if (!parts) return PyErr_NoMemory(), NULL;
    int good = 1;
    for (*count = 0; good && *count < all; ++*count) {
        Part *part = &parts[*count];
        part->buffers = PyList_GET_ITEM(buffers, *count);
        good = PyList_Check(part->buffers) &&
               PyObject_GetBuffer(PyList_GET_ITEM(spans, *count), &part->view, PyBUF_CONTIG_RO) == 0;
        if (!good) break;
        part->spans = part->view.buf, part->count = part->view.len / (8 * COLUMNS);
        size_t places = (size_t)PyList_GET_SIZE(part->buffers);
        part->places = malloc((places + 1) * sizeof *part->places);
        if (part->places) memset(part->places, 0xFF, places * sizeof *part->places);
        good = part->places && part->view.len % (8 * COLUMNS) == 0;
    }
    if (good) return parts;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no spans");
    close_parts(parts, *count);
    return NULL;
}

/* Copy a span, with the place of its buffer in the union. Returns 0 with an exception. */
static int take_span(const Part *part, Py_ssize_t row, Buffers *all, int64_t *out) {
    const int64_t *span = part->spans + COLUMNS * row;
    int64_t buffer = span[BUFFER];
    if (buffer < 0 || buffer >= PyList_GET_SIZE(part->buffers))
        return PyErr_SetString(PyExc_IndexError, "no such buffer"), 0;
    if (part->places[buffer] < 0) {
        int64_t place = place_of(all, PyList_GET_ITEM(part->buffers, buffer));
        if (place < 0) return 0;
        part->places[buffer] = place;
    }
    memcpy(out, span, 8 * COLUMNS);
    out[BUFFER] = part->places[buffer];
    return 1;
}

/* join(spans, buffers, out): the spans of chunks one after the other. Returns the buffers that are used. */
static PyObject *join(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 3)) return NULL;
    Arrays arrays = {.count = 0};
    Py_ssize_t count = 0, cells, total = 0;
    Part *parts = open_parts(args[0], args[1], &count);
    if (!parts) return NULL;
    int64_t *out = array(&arrays, args[2], 8, 1, &cells);
    Buffers all = {PyList_New(0), PyDict_New()};
    int good = out && all.list && all.places;
    for (Py_ssize_t p = 0; p < count; p++) total += parts[p].count;
    if (good && cells != COLUMNS * total)
        good = (PyErr_SetString(PyExc_ValueError, "join: another number of spans"), 0);
    for (Py_ssize_t p = 0; p < count && good; p++)
        for (Py_ssize_t row = 0; row < parts[p].count && good; row++, out += COLUMNS)
            good = take_span(&parts[p], row, &all, out);
    close_parts(parts, count);
    release(&arrays);
    Py_XDECREF(all.places);
    if (!good) Py_CLEAR(all.list);
    return all.list;
}

/* merge(spans, buffers, due, out, source): documents of several sources, in the order in which they are due.
 *
 * Each source has one span for each document, and when each is due, ascending. A source that comes first is first
 * among equals. Fills in the source of each document. Returns the buffers that are used. */
static PyObject *merge(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 5)) return NULL;
    Arrays arrays = {.count = 0};
    Py_ssize_t count = 0, cells, documents, total = 0;
    Part *parts = open_parts(args[0], args[1], &count);
    if (!parts) return NULL;
    int64_t *out = array(&arrays, args[3], 8, 1, &cells);
    int64_t *source = out ? array(&arrays, args[4], 8, 1, &documents) : NULL;
    Buffers all = {PyList_New(0), PyDict_New()};
    int good = source && all.list && all.places;
    struct {
        const double *due;
        Py_ssize_t at;
    } queues[MOST_ARRAYS], *queue = queues;
    Arrays dues = {.count = 0}; /* for few sources: see mixture/iterator.py */
    if (good && (count > MOST_ARRAYS || !PyList_Check(args[2]) || PyList_GET_SIZE(args[2]) != count))
        good = (PyErr_SetString(PyExc_ValueError, "merge: another number of sources"), 0);
    for (Py_ssize_t p = 0; p < count && good; p++) {
        Py_ssize_t times;
        queue[p].due = array(&dues, PyList_GET_ITEM(args[2], p), 8, 0, &times), queue[p].at = 0;
        good = queue[p].due != NULL;
        if (good && times != parts[p].count)
            good = (PyErr_SetString(PyExc_ValueError, "merge: another number of times"), 0);
        total += parts[p].count;
    }
    if (good && (cells != COLUMNS * total || documents != total))
        good = (PyErr_SetString(PyExc_ValueError, "merge: another number of documents"), 0);
    for (Py_ssize_t row = 0; row < total && good; row++) {
        Py_ssize_t best = -1;
        double first = 0;
        for (Py_ssize_t p = 0; p < count; p++) {
            if (queue[p].at == parts[p].count) continue;
            double due = queue[p].due[queue[p].at];
            if (best < 0 || due < first) best = p, first = due;
        }
        good = take_span(&parts[best], queue[best].at++, &all, out + COLUMNS * row);
        source[row] = best;
    }
    close_parts(parts, count);
    release(&dues);
    release(&arrays);
    Py_XDECREF(all.places);
    if (!good) Py_CLEAR(all.list);
    return all.list;
}

/* cut(spans, positions, out, first): the spans of a run of tokens, cut at rising positions.
 *
 * Fills in the spans between the first position and the last, and the number of the first span at each position.
 * Returns how many spans there are. */
static PyObject *cut(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 4)) return NULL;
    Arrays arrays = {.count = 0};
    Py_ssize_t cells, cuts, room, places;
    const int64_t *spans = array(&arrays, args[0], 8, 0, &cells);
    const int64_t *positions = spans ? array(&arrays, args[1], 8, 0, &cuts) : NULL;
    int64_t *out = positions ? array(&arrays, args[2], 8, 1, &room) : NULL;
    int64_t *first = out ? array(&arrays, args[3], 8, 1, &places) : NULL;
    if (!first || cuts < 1 || places != cuts) return failed(&arrays, "cut: arrays of different lengths");
    Py_ssize_t count = cells / COLUMNS, made = 0, at = 0;
    room /= COLUMNS;
    int64_t begin = 0; /* where span `at` starts in the run */
    while (at < count && begin + spans[COLUMNS * at + LENGTH] <= positions[0]) begin += spans[COLUMNS * at++ + LENGTH];
    int64_t now = positions[0];
    first[0] = 0;
    for (Py_ssize_t next = 1; next < cuts; next++) {
        while (now < positions[next]) {
            if (at == count || made == room) return failed(&arrays, "cut: positions beyond the run");
            const int64_t *span = spans + COLUMNS * at;
            int64_t end = begin + span[LENGTH], stop = end < positions[next] ? end : positions[next],
                    into = now - begin;
            int64_t *part = out + COLUMNS * made++;
            memcpy(part, span, 8 * COLUMNS);
            part[START] += into, part[POSITION] += into, part[LENGTH] = stop - now;
            if (into)
                part[BEGINS] = 0;
            else
                part[BEGINS] &= 1;
            if (stop != end) part[TAIL] = 0;
            now = stop;
            while (at < count && begin + spans[COLUMNS * at + LENGTH] <= now) begin += spans[COLUMNS * at++ + LENGTH];
        }
        first[next] = made;
    }
    release(&arrays);
    return PyLong_FromSsize_t(made);
}

/* A list of pieces of memory that grows. */
typedef struct {
    struct iovec *pieces;
    Py_ssize_t count, room;
    uint64_t bytes;
} Pieces;

static int add_piece(Pieces *pieces, int64_t address, int64_t size) {
    if (!size) return 1;
    if (pieces->count == pieces->room) {
        Py_ssize_t room = pieces->room ? 2 * pieces->room : 1024;
        struct iovec *grown = realloc(pieces->pieces, (size_t)room * sizeof *grown);
        if (!grown) return PyErr_NoMemory(), 0;
        pieces->pieces = grown, pieces->room = room;
    }
    pieces->pieces[pieces->count++] = (struct iovec){(void *)(intptr_t)address, (size_t)size};
    pieces->bytes += (uint64_t)size;
    return 1;
}

/* Copy the pieces, one after the other. Returns 0 if one of them can't be read: see memory.py. */
static int copy_pieces(Pieces *pieces, char *target) {
    enum { MOST_PIECES = 1024, BEGIN = 64 };
    pid_t process = getpid();
    struct iovec *next = pieces->pieces, *end = next + pieces->count;
    uint64_t left = pieces->bytes;
    while (left) {
        struct iovec into = {target, left};
        size_t most = end - next < MOST_PIECES ? (size_t)(end - next) : MOST_PIECES;
        for (size_t i = 0; i < most; i++) /* the pieces are anywhere in memory: begin to load all of them */
            for (size_t at = 0; at < next[i].iov_len && at < BEGIN; at += 64)
                __builtin_prefetch((char *)next[i].iov_base + at);
        ssize_t copied = process_vm_writev(process, next, most, &into, 1, 0);
        if (copied <= 0) return 0;
        target += copied, left -= (uint64_t)copied;
        while (copied && (size_t)copied >= next->iov_len) copied -= (ssize_t)next++->iov_len;
        if (copied) next->iov_base = (char *)next->iov_base + copied, next->iov_len -= (size_t)copied;
    }
    return 1;
}

/* What a file looked like when it was mapped. */
typedef struct {
    const char *path;
    unsigned long long size, modified, inode;
} Stamp;

static int is_unchanged(const Stamp *stamp) {
    struct stat now;
    return !stat(stamp->path, &now) && S_ISREG(now.st_mode) && (unsigned long long)now.st_size == stamp->size &&
           (unsigned long long)(now.st_mtim.tv_sec * INT64_C(1000000000) + now.st_mtim.tv_nsec) == stamp->modified &&
           now.st_ino == stamp->inode;
}

/* Read `source.stamp`. Returns 0 if it has none, -1 with an exception. */
static int read_stamp(PyObject *source, Stamp *stamp) {
    PyObject *found = PyObject_GetAttr(source, STAMP);
    if (!found) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    int good = PyArg_ParseTuple(found, "yKKK", &stamp->path, &stamp->size, &stamp->modified, &stamp->inode);
    Py_DECREF(found); /* the source keeps it */
    return good ? 1 : -1;
}

/* Add the pieces of one line of a MemoryTable, and what they are mapped from. Returns 0 with an exception. */
static int add_line(PyObject *table, Py_ssize_t line, Pieces *pieces, PyObject *sources) {
    PyObject *memory, *firsts, *numbers, *mapped, *last = NULL;
    if (!PyTuple_Check(table) || PyTuple_GET_SIZE(table) != 5 || !PyBytes_Check(memory = PyTuple_GET_ITEM(table, 0)) ||
        !PyBytes_Check(firsts = PyTuple_GET_ITEM(table, 1)) || !PyBytes_Check(numbers = PyTuple_GET_ITEM(table, 2)) ||
        !PyTuple_Check(mapped = PyTuple_GET_ITEM(table, 3)))
        return PyErr_SetString(PyExc_TypeError, "locate: no table of lines"), 0;
    const int64_t *piece = (const int64_t *)PyBytes_AS_STRING(memory),
                  *first = (const int64_t *)PyBytes_AS_STRING(firsts);
    const int64_t *number = (const int64_t *)PyBytes_AS_STRING(numbers);
    Py_ssize_t spans = PyBytes_GET_SIZE(numbers) / 8, lines = PyBytes_GET_SIZE(firsts) / 8 - 1;
    if (line < 0 || line >= lines || PyBytes_GET_SIZE(memory) != 32 * spans || first[line] < 0 ||
        first[line + 1] > spans)
        return PyErr_SetString(PyExc_IndexError, "locate: no such line"), 0;
    for (int64_t span = first[line]; span < first[line + 1]; span++) {
        if (!add_piece(pieces, piece[4 * span], piece[4 * span + 1]) ||
            !add_piece(pieces, piece[4 * span + 2], piece[4 * span + 3]))
            return 0;
        if (number[span] < 0 || number[span] >= PyTuple_GET_SIZE(mapped)) continue;
        PyObject *from = PyTuple_GET_ITEM(mapped, number[span]);
        if (from != last && PySet_Add(sources, from) < 0) return 0;
        last = from;
    }
    return 1;
}

/* locate(rows, length, dtype, sources): where lines are in memory.
 *
 * Rows are pairs of a chunk and a line in it; see Chunk.at_once. Returns the padding of each line, and the memory as
 * addresses and sizes, one after the other. Adds what it is mapped from to `sources`. Returns None if the lines
 * differ in length or type. */
static PyObject *locate(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 4)) return NULL;
    PyObject *rows = args[0], *dtype = args[2], *sources = args[3], *result = NULL;
    Py_ssize_t length = PyLong_AsSsize_t(args[1]);
    if (length == -1 && PyErr_Occurred()) return NULL;
    if (!PyList_Check(rows) || !PySet_Check(sources))
        return PyErr_SetString(PyExc_TypeError, "locate: a list and a set"), NULL;
    Py_ssize_t count = PyList_GET_SIZE(rows);
    Pieces pieces = {NULL, 0, 0, 0};
    PyObject *padding = PyList_New(0);
    for (Py_ssize_t i = 0; padding && i < count; i++) {
        PyObject *row = PyList_GET_ITEM(rows, i), *whole = NULL;
        Py_ssize_t line = -1;
        if (PyTuple_Check(row) && PyTuple_GET_SIZE(row) == 2) {
            line = PyLong_AsSsize_t(PyTuple_GET_ITEM(row, 1));
            whole = line == -1 && PyErr_Occurred() ? NULL : PyObject_GetAttr(PyTuple_GET_ITEM(row, 0), AT_ONCE);
        }
        if (!whole || !PyTuple_Check(whole) || PyTuple_GET_SIZE(whole) != 4) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "locate: no row");
            Py_XDECREF(whole);
            goto end;
        }
        PyObject *type = PyTuple_GET_ITEM(whole, 1), *table = PyTuple_GET_ITEM(whole, 2),
                 *padded = PyTuple_GET_ITEM(whole, 3);
        int same = type == dtype ? 1 : PyObject_RichCompareBool(type, dtype, Py_EQ);
        if (same == 1) same = PyLong_AsSsize_t(PyTuple_GET_ITEM(whole, 0)) == length && table != Py_None;
        if (PyErr_Occurred() || (same && !add_line(table, line, &pieces, sources))) same = -1;
        if (same == 1) {
            int has = PyList_Check(padded) && line < PyList_GET_SIZE(padded);
            PyObject *number = has ? Py_NewRef(PyList_GET_ITEM(padded, line)) : PyLong_FromLong(0);
            if (!number || PyList_Append(padding, number) < 0) same = -1;
            Py_XDECREF(number);
        }
        Py_DECREF(whole);
        if (same == 0) result = Py_NewRef(Py_None);
        if (same != 1) goto end;
    }
    PyObject *memory = padding ? PyByteArray_FromStringAndSize((char *)pieces.pieces, pieces.count * 16) : NULL;
    if (memory) result = PyTuple_Pack(2, padding, memory);
    Py_XDECREF(memory);
end:
    free(pieces.pieces);
    Py_XDECREF(padding);
    return result;
}

/* Batches that lines of tokens become as int64: of each, all but the last `extra` tokens of a line, and all but the
 * first. */
typedef struct {
    Py_buffer *views; /* inputs and labels of one batch after the other */
    Py_ssize_t count; /* of views */
    Py_ssize_t length, extra, width;
    int is_signed;
} Shifted;

static void close_shifted(Shifted *shifted) {
    while (shifted->count) PyBuffer_Release(&shifted->views[--shifted->count]);
    free(shifted->views);
    shifted->views = NULL;
}

/* For arrays that are to be filled from tokens. Returns 0 with an exception if they don't fit. */
static int open_shifted(Shifted *shifted, const Py_buffer *tokens, PyObject *wide, PyObject *extra) {
    *shifted = (Shifted){.extra = PyLong_AsSsize_t(extra)};
    if (PyErr_Occurred()) return 0;
    if (!PyList_Check(wide)) return PyErr_SetString(PyExc_TypeError, "widen: expected a list of arrays"), 0;
    Py_ssize_t arrays = PyList_GET_SIZE(wide), sizes[2] = {0, 0};
    if (!arrays) return 1;
    char kind = tokens->format && tokens->format[0] && !tokens->format[1] ? tokens->format[0] : 0;
    if (tokens->ndim != 2 || shifted->extra < 0 || tokens->shape[1] <= shifted->extra || arrays % 2 || !kind ||
        !strchr("bBhHiIlLqQ", kind))
        return PyErr_SetString(PyExc_ValueError, "widen: arrays of another shape or type"), 0;
    shifted->length = tokens->shape[1] - shifted->extra, shifted->width = tokens->itemsize;
    shifted->is_signed = strchr("bhilq", kind) != NULL;
    if (!(shifted->views = calloc((size_t)arrays, sizeof *shifted->views))) return PyErr_NoMemory(), 0;
    for (Py_ssize_t i = 0; i < arrays; i++) {
        Py_buffer *view = &shifted->views[i];
        if (PyObject_GetBuffer(PyList_GET_ITEM(wide, i), view, PyBUF_CONTIG) < 0) return 0;
        shifted->count++, sizes[i % 2] += view->len;
        if (view->itemsize != 8 || view->len % (8 * shifted->length) || sizes[1] > sizes[0])
            return PyErr_SetString(PyExc_ValueError, "widen: arrays of another size"), 0;
        if (i % 2 && sizes[0] != sizes[1]) return PyErr_SetString(PyExc_ValueError, "widen: arrays of another size"), 0;
    }
    if (sizes[0] != 8 * tokens->shape[0] * shifted->length)
        return PyErr_SetString(PyExc_ValueError, "widen: arrays of another size"), 0;
    return 1;
}

#define FILL(type)                                                                                                     \
    for (Py_ssize_t line = 0; line < lines; line++, from += (length + extra) * (Py_ssize_t)sizeof(type)) {             \
        for (Py_ssize_t i = 0; i < length; i++) *inputs++ = (int64_t)((const type *)from)[i];                          \
        for (Py_ssize_t i = 0; i < length; i++) *labels++ = (int64_t)((const type *)from)[i + extra];                  \
    }

static void fill_shifted(const Shifted *shifted, const void *tokens) {
    const char *from = tokens;
    Py_ssize_t length = shifted->length, extra = shifted->extra;
    for (Py_ssize_t i = 0; i < shifted->count; i += 2) {
        int64_t *restrict inputs = shifted->views[i].buf, *restrict labels = shifted->views[i + 1].buf;
        Py_ssize_t lines = shifted->views[i].len / (8 * length);
        switch (shifted->width * 2 + shifted->is_signed) {
        case 2: FILL(uint8_t) break;
        case 3: FILL(int8_t) break;
        case 4: FILL(uint16_t) break;
        case 5: FILL(int16_t) break;
        case 8: FILL(uint32_t) break;
        case 9: FILL(int32_t) break;
        default: FILL(int64_t) break;
        }
    }
}

/* A copy of memory, and then a check of the files that it is mapped from; then `shifted` is filled. */
typedef struct Copy {
    Pieces pieces;
    Py_buffer out;
    Stamp *stamps;
    Py_ssize_t count;  /* of stamps */
    PyObject *checked; /* keeps their paths */
    Shifted shifted;
    int good;
    int started; /* in another thread */
    int ended;
    pid_t process; /* that started it */
    struct Copy *next;
} Copy;

/* Prepare a copy. What has a `stamp` leaves `sources`. Returns 0 with an exception. */
static int open_copy(Copy *copy, PyObject *memory, PyObject *out, PyObject *sources) {
    Py_buffer given;
    memset(copy, 0, sizeof *copy);
    if (!PySet_Check(sources)) return PyErr_SetString(PyExc_TypeError, "copy: expected a set of sources"), 0;
    if (PyObject_GetBuffer(memory, &given, PyBUF_CONTIG_RO) < 0) return 0;
    int good = PyObject_GetBuffer(out, &copy->out, PyBUF_CONTIG | PyBUF_FORMAT) == 0;
    for (Py_ssize_t at = 0; good && at + 16 <= given.len; at += 16) {
        int64_t piece[2];
        memcpy(piece, (char *)given.buf + at, 16);
        good = add_piece(&copy->pieces, piece[0], piece[1]);
    }
    if (good && (copy->pieces.bytes != (uint64_t)copy->out.len || given.len % 16)) {
        PyErr_SetString(PyExc_ValueError, "copy: pieces of another size");
        good = 0;
    }
    PyBuffer_Release(&given);
    if (!good || !(copy->checked = PySequence_List(sources))) return 0;
    copy->stamps = malloc((size_t)(PyList_GET_SIZE(copy->checked) + 1) * sizeof *copy->stamps);
    if (!copy->stamps) return PyErr_NoMemory(), 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(copy->checked); i++) {
        PyObject *source = PyList_GET_ITEM(copy->checked, i);
        int found = read_stamp(source, &copy->stamps[copy->count]);
        if (found < 0 || (found && PySet_Discard(sources, source) < 0)) return 0;
        copy->count += found;
    }
    return 1;
}

static void run_copy(Copy *copy) {
    copy->good = copy_pieces(&copy->pieces, copy->out.buf);
    for (Py_ssize_t i = 0; i < copy->count && copy->good; i++) copy->good = is_unchanged(&copy->stamps[i]);
    if (copy->good) fill_shifted(&copy->shifted, copy->out.buf);
}

/* The thread in which copies run. It starts with the first copy, ends when it had nothing to do for a while, and touches
 * nothing of Python. A process that is forked has none of it: it begins anew. */
static struct {
    pid_t process;
    int alive;
    Copy *first, *last; /* that wait or run */
    pthread_mutex_t lock;
    pthread_cond_t changed;
} COPIER;
enum { IDLE_SECONDS = 1 };

static void *run_copies(void *Py_UNUSED(argument)) {
    pthread_mutex_lock(&COPIER.lock);
    for (int timeout = 0; COPIER.first || !timeout;) {
        if (COPIER.first) {
            Copy *copy = COPIER.first;
            pthread_mutex_unlock(&COPIER.lock);
            run_copy(copy);
            pthread_mutex_lock(&COPIER.lock);
            COPIER.first = copy->next;
            copy->ended = 1; /* from here on it may be freed */
            pthread_cond_broadcast(&COPIER.changed);
            continue;
        }
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += IDLE_SECONDS;
        while (!COPIER.first && !timeout) timeout = pthread_cond_timedwait(&COPIER.changed, &COPIER.lock, &until);
    }
    COPIER.alive = 0;
    pthread_mutex_unlock(&COPIER.lock);
    return NULL;
}

/* Run a copy in the thread. Returns 0 if there is none. Called with the lock of Python. */
static int hand_over(Copy *copy) {
    if (COPIER.process != getpid()) {
        pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
        COPIER.process = getpid(), COPIER.alive = 0, COPIER.first = NULL;
        COPIER.lock = lock, COPIER.changed = changed;
    }
    pthread_mutex_lock(&COPIER.lock);
    if (!COPIER.alive) {
        sigset_t all, before; /* signals are for the threads of Python */
        pthread_attr_t detached;
        pthread_t thread;
        sigfillset(&all);
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        COPIER.alive = pthread_create(&thread, &detached, run_copies, NULL) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&detached);
    }
    copy->started = COPIER.alive;
    if (copy->started) {
        copy->process = COPIER.process;
        if (COPIER.first) COPIER.last->next = copy;
        else COPIER.first = copy;
        COPIER.last = copy;
        pthread_cond_broadcast(&COPIER.changed);
    }
    pthread_mutex_unlock(&COPIER.lock);
    return copy->started;
}

static void finish_copy(Copy *copy) {
    if (!copy->started) return;
    if (copy->process != getpid()) { /* forked from it meanwhile: the thread is not here, and its copy is not whole */
        copy->started = copy->good = 0;
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&COPIER.lock);
    while (!copy->ended) pthread_cond_wait(&COPIER.changed, &COPIER.lock);
    pthread_mutex_unlock(&COPIER.lock);
    Py_END_ALLOW_THREADS
    copy->started = 0; /* only now: another thread that waits for it must wait, too */
}

static void close_copy(Copy *copy) {
    finish_copy(copy);
    close_shifted(&copy->shifted);
    free(copy->pieces.pieces), free(copy->stamps);
    Py_XDECREF(copy->checked);
    if (copy->out.obj) PyBuffer_Release(&copy->out);
}

/* copy(pieces, out, sources): copies memory, rows of address and size, and checks what it is mapped from.
 *
 * Takes all that have a `stamp` from the sources; the caller has to check the others. Returns whether all could be
 * read, and nothing with a stamp has changed since. */
static PyObject *copy(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 3)) return NULL;
    Copy copy;
    int good = open_copy(&copy, args[0], args[1], args[2]);
    if (good) {
        Py_BEGIN_ALLOW_THREADS run_copy(&copy);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = good ? PyBool_FromLong(copy.good) : NULL;
    close_copy(&copy);
    return result;
}

static void forget_copy(PyObject *capsule) {
    Copy *copy = PyCapsule_GetPointer(capsule, "copy");
    close_copy(copy);
    free(copy);
}

/* start_copy(pieces, out, sources, wide, extra): `copy` in another thread, and then `widen` of `out` to the arrays of
 * some batches: inputs and labels of one after the other. Returns it for `end_copy`. */
static PyObject *start_copy(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 5)) return NULL;
    Copy *copy = malloc(sizeof *copy);
    if (!copy) return PyErr_NoMemory();
    int good = open_copy(copy, args[0], args[1], args[2]) && open_shifted(&copy->shifted, &copy->out, args[3], args[4]);
    PyObject *capsule = good ? PyCapsule_New(copy, "copy", forget_copy) : NULL;
    if (!capsule) return close_copy(copy), free(copy), NULL;
    if (!hand_over(copy)) {
        Py_BEGIN_ALLOW_THREADS
        run_copy(copy);
        Py_END_ALLOW_THREADS
    }
    return capsule;
}

/* end_copy(started): waits for a copy, and returns what `copy` returns. */
static PyObject *end_copy(PyObject *Py_UNUSED(self), PyObject *capsule) {
    Copy *copy = PyCapsule_GetPointer(capsule, "copy");
    if (!copy) return NULL;
    finish_copy(copy);
    return PyBool_FromLong(copy->good);
}

/* Where the tokens of the buffers of a chunk are, which are all of one class and one type. */
typedef struct {
    PyObject *buffers, *mapped, *dtype; /* `dtype` is NULL before the first */
    int64_t width;
    struct Place {
        int64_t address, length;
        PyObject *source;
    } *places; /* of each buffer that is used */
} Places;

static int open_places(Places *all, PyObject *buffers, PyObject *mapped) {
    *all = (Places){buffers, mapped, NULL, 0, NULL};
    if (!PyList_Check(buffers)) return PyErr_SetString(PyExc_TypeError, "expected a list of buffers"), 0;
    all->places = calloc((size_t)PyList_GET_SIZE(buffers) + 1, sizeof *all->places);
    return all->places ? 1 : (PyErr_NoMemory(), 0);
}

static void close_places(Places *all) {
    for (Py_ssize_t i = 0; all->places && i < PyList_GET_SIZE(all->buffers); i++) Py_XDECREF(all->places[i].source);
    free(all->places);
    Py_XDECREF(all->dtype);
}

static int64_t number_of(PyObject *object, PyObject *name) {
    PyObject *found = PyObject_GetAttr(object, name);
    int64_t number = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return number;
}

/* The place of a buffer. NULL if its tokens are of another class or type, or with an exception. */
static struct Place *place_in(Places *all, int64_t buffer) {
    if (buffer < 0 || buffer >= PyList_GET_SIZE(all->buffers)) return NULL;
    struct Place *place = &all->places[buffer];
    if (place->source) return place;
    PyObject *tokens = PyObject_GetAttr(PyList_GET_ITEM(all->buffers, buffer), TOKENS);
    if (tokens && (PyObject *)Py_TYPE(tokens) == all->mapped) {
        PyObject *dtype = PyObject_GetAttr(tokens, DTYPE);
        if (dtype && !all->dtype) {
            all->dtype = Py_NewRef(dtype);
            all->width = number_of(dtype, ITEMSIZE);
        }
        if (dtype && dtype == all->dtype) {
            place->address = number_of(tokens, ADDRESS), place->length = number_of(tokens, LENGTH_NAME);
            place->source = PyErr_Occurred() ? NULL : PyObject_GetAttr(tokens, SOURCE);
        }
        Py_XDECREF(dtype);
    }
    Py_XDECREF(tokens);
    return place->source ? place : NULL;
}

/* Where the stored tokens of a span are; 0 if not in its buffer. */
static int64_t stored_at(const struct Place *place, const int64_t *span, int64_t stored, int64_t width) {
    int good = span[START] >= 0 && stored >= 0 && span[START] <= place->length && stored <= place->length - span[START];
    return good ? place->address + span[START] * width : 0;
}

/* last_tokens(buffers, mapped, spans, first): the last stored token of each item of a chunk, copied.
 *
 * Item i is the spans first[i] to first[i + 1] - 1; a span that has a tail counts without it. Returns the type of the
 * tokens and their bytes; None if not all tokens are of the class `mapped` and of one type, or can't be read. */
static PyObject *last_tokens(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 4)) return NULL;
    Arrays arrays = {.count = 0};
    Pieces pieces = {NULL, 0, 0, 0};
    PyObject *copied = NULL, *result = NULL;
    Py_ssize_t cells, count;
    const int64_t *spans = array(&arrays, args[2], 8, 0, &cells);
    const int64_t *first = spans ? array(&arrays, args[3], 8, 0, &count) : NULL;
    if (!first || count-- < 1) return failed(&arrays, "last_tokens: no chunk");
    Places all;
    int good = open_places(&all, args[0], args[1]);
    for (Py_ssize_t item = 0; item < count && good; item++) {
        int64_t last = first[item + 1] - 1;
        if (last < 0 || last >= cells / COLUMNS) {
            PyErr_SetString(PyExc_IndexError, "last_tokens: no such span");
            goto end;
        }
        const int64_t *span = spans + COLUMNS * last;
        struct Place *place = place_in(&all, span[BUFFER]);
        int64_t stored = span[LENGTH] - (span[TAIL] > 0), start = place ? stored_at(place, span, stored, all.width) : 0;
        good = start && stored > 0 && add_piece(&pieces, start + (stored - 1) * all.width, all.width);
    }
    if (good && all.dtype) copied = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)pieces.bytes);
    if (copied) {
        char *out = PyByteArray_AS_STRING(copied);
        Py_BEGIN_ALLOW_THREADS good = copy_pieces(&pieces, out);
        Py_END_ALLOW_THREADS if (good) result = PyTuple_Pack(2, all.dtype, copied);
    }
end:
    if (!result && !PyErr_Occurred()) result = Py_NewRef(Py_None);
    Py_XDECREF(copied);
    free(pieces.pieces);
    close_places(&all);
    release(&arrays);
    return result;
}

/* Write a token of this many bytes. Returns 0 if it does not fit. */
static int write_token(char *out, int64_t token, int64_t width, int is_signed) {
    int bits = (int)(8 * width) - is_signed;
    if (token < 0 || (bits < 63 && token >> bits)) return 0;
    if (width == 8) return memcpy(out, &token, 8), 1;
    if (width == 4) {
        uint32_t narrow = (uint32_t)token;
        return memcpy(out, &narrow, 4), 1;
    }
    if (width == 2) {
        uint16_t narrow = (uint16_t)token;
        return memcpy(out, &narrow, 2), 1;
    }
    return width == 1 ? (*out = (char)token, 1) : 0;
}

/* table(buffers, mapped, spans, first): where the lines of a chunk are in memory, see MemoryTable.
 *
 * Returns the length of the lines, the type of the tokens, and the fields of the table. None if the lines differ in
 * length, a token is not where its span says, or not all tokens are of the class `mapped` and of one native type. */
static PyObject *table(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 4)) return NULL;
    Arrays arrays = {.count = 0};
    PyObject *pieces = NULL, *numbers = NULL, *tails = NULL, *firsts = NULL, *sources = NULL, *mapped = NULL,
             *result = NULL;
    PyObject *places = NULL;
    Py_ssize_t cells, count;
    const int64_t *spans = array(&arrays, args[2], 8, 0, &cells);
    const int64_t *first = spans ? array(&arrays, args[3], 8, 0, &count) : NULL;
    if (!first || count-- < 2) return failed(&arrays, "table: no lines");
    Py_ssize_t rows = cells / COLUMNS;
    Places all;
    int good = open_places(&all, args[0], args[1]);
    int64_t length = -1;
    for (Py_ssize_t line = 0; line < count && good; line++) {
        int64_t tokens = 0;
        good = first[line] >= 0 && first[line] < first[line + 1] && first[line + 1] <= rows;
        for (int64_t row = first[line]; good && row < first[line + 1]; row++) tokens += spans[COLUMNS * row + LENGTH];
        if (line && tokens != length) good = 0;
        length = tokens;
    }
    if (!good || first[0] || first[count] != rows || !place_in(&all, spans[BUFFER])) goto end;
    PyObject *kind = PyObject_GetAttr(all.dtype, KIND), *native = kind ? PyObject_GetAttr(all.dtype, ISNATIVE) : NULL;
    int is_signed = kind && PyUnicode_Check(kind) && !PyUnicode_CompareWithASCIIString(kind, "i");
    good = native == Py_True && (is_signed || !PyUnicode_CompareWithASCIIString(kind, "u"));
    Py_XDECREF(kind), Py_XDECREF(native);
    if (!good) goto end;
    pieces = PyBytes_FromStringAndSize(NULL, 32 * rows), numbers = PyBytes_FromStringAndSize(NULL, 8 * rows);
    tails = PyBytes_FromStringAndSize(NULL, all.width * rows),
    firsts = PyBytes_FromStringAndSize((const char *)first, 8 * (count + 1));
    sources = PyList_New(0), places = PyDict_New();
    if (!pieces || !numbers || !tails || !firsts || !sources || !places) goto end;
    Buffers known = {sources, places};
    int64_t *piece = (int64_t *)PyBytes_AS_STRING(pieces), *number = (int64_t *)PyBytes_AS_STRING(numbers);
    char *tail = PyBytes_AS_STRING(tails);
    struct Place *last = NULL;
    for (Py_ssize_t row = 0; row < rows; row++, piece += 4, tail += all.width) {
        const int64_t *span = spans + COLUMNS * row;
        struct Place *place = place_in(&all, span[BUFFER]);
        int64_t stored = span[LENGTH] - (span[TAIL] > 0);
        if (!place || !(piece[0] = stored_at(place, span, stored, all.width))) goto end;
        piece[1] = stored * all.width, piece[2] = (int64_t)(intptr_t)tail, piece[3] = span[TAIL] > 0 ? all.width : 0;
        if (span[TAIL] > 0 && !write_token(tail, span[TAIL] - 1, all.width, is_signed)) goto end;
        number[row] = place == last ? number[row - 1] : place_of(&known, place->source);
        if (number[row] < 0) goto end;
        last = place;
    }
    mapped = PyList_AsTuple(sources);
    if (mapped)
        result = Py_BuildValue("LO(OOOOO)", (long long)length, all.dtype, pieces, firsts, numbers, mapped, tails);
end:
    if (!result && !PyErr_Occurred()) result = Py_NewRef(Py_None);
    Py_XDECREF(pieces), Py_XDECREF(numbers), Py_XDECREF(tails), Py_XDECREF(firsts);
    Py_XDECREF(sources), Py_XDECREF(places), Py_XDECREF(mapped);
    close_places(&all);
    release(&arrays);
    return result;
}

/* widen(tokens, inputs, labels, extra): each line of tokens but its last `extra`, and but its first, as int64. */
static PyObject *widen(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs) {
    if (!counted(nargs, 4)) return NULL;
    Py_buffer tokens;
    if (PyObject_GetBuffer(args[0], &tokens, PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0) return NULL;
    PyObject *wide = PyList_New(0);
    Shifted shifted = {.count = 0};
    int good = wide && PyList_Append(wide, args[1]) == 0 && PyList_Append(wide, args[2]) == 0 &&
               open_shifted(&shifted, &tokens, wide, args[3]);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        fill_shifted(&shifted, tokens.buf);
        Py_END_ALLOW_THREADS
    }
    close_shifted(&shifted);
    PyBuffer_Release(&tokens);
    Py_XDECREF(wide);
    if (!good) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"keys_of", (PyCFunction)(void (*)(void))keys_of, METH_FASTCALL, NULL},
    {"in_order", (PyCFunction)(void (*)(void))in_order, METH_FASTCALL, NULL},
    {"join", (PyCFunction)(void (*)(void))join, METH_FASTCALL, NULL},
    {"merge", (PyCFunction)(void (*)(void))merge, METH_FASTCALL, NULL},
    {"cut", (PyCFunction)(void (*)(void))cut, METH_FASTCALL, NULL},
    {"last_tokens", (PyCFunction)(void (*)(void))last_tokens, METH_FASTCALL, NULL},
    {"table", (PyCFunction)(void (*)(void))table, METH_FASTCALL, NULL},
    {"locate", (PyCFunction)(void (*)(void))locate, METH_FASTCALL, NULL},
    {"widen", (PyCFunction)(void (*)(void))widen, METH_FASTCALL, NULL},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, NULL},
    {"start_copy", (PyCFunction)(void (*)(void))start_copy, METH_FASTCALL, NULL},
    {"end_copy", end_copy, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    struct {
        PyObject **name;
        const char *text;
    } names[] = {{&AT_ONCE, "at_once"}, {&STAMP, "stamp"},        {&TOKENS, "tokens"},     {&DTYPE, "dtype"},
                 {&ADDRESS, "address"}, {&LENGTH_NAME, "length"}, {&ITEMSIZE, "itemsize"}, {&SOURCE, "source"},
                 {&KIND, "kind"},       {&ISNATIVE, "isnative"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text))) return NULL;
    PyObject *module = PyModule_Create(&MODULE);
    if (module && PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) Py_CLEAR(module);
    return module;
}
