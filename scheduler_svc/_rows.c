/* The passes of a step over the rows of the table, compiled. Pure: no clock, no lock, no input or output.

   Each method does what a Python function does, which its docstring names, on the same columns, lists and
   objects, and leaves them the same: tests/scheduler_svc/test_compiled.py holds both against each other. It is
   made for what every step has. Where it meets something else it changes nothing and returns None, and the
   Python one decides. Without a C compiler at installation there is no such module, and everything runs in Python
   (compiled.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

/* As in protocol/queues.py and protocol/limits.py; `Passes` refuses to work with others. */
enum { FREE, WAITING, RUNNING, ENDING };
enum { QUEUED, RESUMED, PREEMPTED, PREFILL, DECODE };
enum { BLOCK_SIZE = 128, REQUEST_ID_BYTES = 16 };

/* ---------------------------------------------------------------- objects */

/* A variable of these kinds gives up what it holds where its block ends, however that is left. */
static void give_up(PyObject **object) { Py_XDECREF(*object); }

static void let_go(Py_buffer *view)
{
    if (view->obj != NULL)
        PyBuffer_Release(view);
}

static void free_memory(void *pointer) { PyMem_Free(*(void **)pointer); }

#define OWNED __attribute__((cleanup(give_up))) PyObject
#define HELD __attribute__((cleanup(let_go))) Py_buffer
#define SCRATCH __attribute__((cleanup(free_memory)))

#define NAMES(X)                                                                                       \
    X(_data) X(_end) X(_ends_any) X(_free) X(_grow) X(_of) X(_refs) X(_waiting_of) X(asked) X(by_row)  \
    X(close) X(counts) X(cut_at) X(decoders) X(decodes) X(decoding) X(drafted) X(free_slots)           \
    X(outputs) X(plain) X(pool) X(prefilling) X(rows) X(sampled) X(seen) X(status) X(stop_ids)         \
    X(table) X(tokens) X(waiting)

#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)
static PyObject *s_stop, *s_length, *s_empty, *no_tuple, *zero, *one, *minus_one;

#define get PyObject_GetAttr
#define set PyObject_SetAttr

static PyObject *get_a(PyObject *object, PyObject *name, PyTypeObject *type)
{
    PyObject *value = get(object, name);
    if (value != NULL && !PyObject_TypeCheck(value, type)) {
        PyErr_Format(PyExc_TypeError, "%U is no %s", name, type->tp_name);
        Py_CLEAR(value);
    }
    return value;
}

#define get_list(object, name) get_a(object, name, &PyList_Type)
#define get_dict(object, name) get_a(object, name, &PyDict_Type)
#define get_bytes(object, name) get_a(object, name, &PyBytes_Type)

/* The integer attribute; -1, perhaps with an error. */
static Py_ssize_t get_index(PyObject *object, PyObject *name)
{
    OWNED *value = get(object, name);
    return value == NULL ? -1 : PyLong_AsSsize_t(value);
}

/* 1, 0, or -1 with an error. */
static int get_truth(PyObject *object, PyObject *name)
{
    OWNED *value = get(object, name);
    return value == NULL ? -1 : PyObject_IsTrue(value);
}

/* Appends and gives up the reference; `item` may be NULL, with an error. */
static int push(PyObject *list, PyObject *item)
{
    OWNED *owned = item;
    return owned == NULL ? -1 : PyList_Append(list, owned);
}

static int cut_tail(PyObject *list, Py_ssize_t count)
{
    Py_ssize_t size = PyList_GET_SIZE(list);
    return count ? PyList_SetSlice(list, size - count, size, NULL) : 0;
}

static PyObject *new_bytes(Py_ssize_t size) { return PyBytes_FromStringAndSize(NULL, size); }

#define BYTES(object) ((uint8_t *)PyBytes_AS_STRING(object))
#define INTS(object) ((int32_t *)PyBytes_AS_STRING(object))
#define ROWS(object) ((Py_ssize_t *)PyBytes_AS_STRING(object))

/* An array whose items have `itemsize` bytes. */
static int hold(PyObject *array, Py_ssize_t itemsize, int flags, Py_buffer *view)
{
    if (PyObject_GetBuffer(array, view, PyBUF_ND | flags) < 0)
        return -1;
    if (view->itemsize == itemsize)
        return 0;
    PyErr_Format(PyExc_TypeError, "an array of items of %zd bytes, not %zd", view->itemsize, itemsize);
    return -1;
}

static int hold_of(PyObject *object, PyObject *name, Py_ssize_t itemsize, int flags, Py_buffer *view)
{
    OWNED *array = get(object, name);
    return array == NULL ? -1 : hold(array, itemsize, flags, view);
}

#define LENGTH(view) ((view).shape[0])

static int wrong(const char *text)
{
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_AssertionError, text);
    return -1;
}

static int arguments(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
    return -1;
}

/* ---------------------------------------------------------------- the columns */

#define COLUMNS(X)                                                                                     \
    X(state, uint8_t) X(phase, uint8_t) X(named, uint8_t) X(request_ids, uint8_t) X(index, int32_t)    \
    X(attempt, int64_t) X(arrival_ns, int64_t) X(prompt_tokens, int32_t) X(end_token, int32_t)         \
    X(cached_tokens, int32_t) X(preemptions, int32_t) X(output_tokens, int32_t)                        \
    X(max_tokens, int32_t) X(min_tokens, int32_t) X(slot, int32_t) X(blocks, int32_t) X(told, int32_t) \
    X(committed, int32_t) X(planned, int32_t) X(rows_max, int32_t) X(drafted_max, int32_t)             \
    X(last_token, int32_t) X(last_plan, int64_t) X(handle, int64_t) X(base, int64_t) X(room, int32_t)  \
    X(mark, int32_t)

#define NUMBER(name, type) AT_##name,
#define DESCRIBE(name, type) {#name, sizeof(type)},
#define POINTER(name, type) type *name;
#define POINT(name, type) self->at.name = self->views[AT_##name].buf;
enum { COLUMNS(NUMBER) NUM_COLUMNS };
static const struct {
    const char *name;
    Py_ssize_t itemsize;
} COLUMN[] = {COLUMNS(DESCRIBE)};

/* Slots of the classes that a pass touches for every sequence: read and written where they lie. */
#define SLOTS(X)                                                                                       \
    X(key, sequence, "key") X(attempt, sequence, "attempt") X(prompt, sequence, "prompt")              \
    X(num_prompt, sequence, "num_prompt") X(sampling, sequence, "sampling")                            \
    X(handle, sequence, "handle") X(copy_key, sequence, "copy_key") X(table, sequence, "table")        \
    X(row, sequence, "row") X(ended, sequence, "ended") X(slot, sequence, "slot")                      \
    X(blocks, sequence, "blocks") X(known, sequence, "known") X(stored, sequence, "stored")            \
    X(load, sequence, "load") X(cached, sequence, "cached") X(scores, sequence, "scores")              \
    X(finish, sequence, "finish") X(code, sequence, "code") X(error, sequence, "error")                \
    X(finished_ns, sequence, "finished_ns") X(final_due_ns, sequence, "final_due_ns")                  \
    X(chunk_of, chunk, "sequence") X(chunk_start, chunk, "start") X(chunk_count, chunk, "count")       \
    X(chunk_samples, chunk, "samples") X(chunk_region, chunk, "region")                                \
    X(arrival_ns, sequence, "arrival_ns") X(resumed, sequence, "resumed")                              \
    X(max_outputs, sequence, "max_outputs") X(logprobs, sampling, "logprobs")                          \
    X(min_tokens, sampling, "min_tokens") X(ignore_eos, sampling, "ignore_eos")                        \
    X(predicted, sampling, "predicted_token_ids")
#define OFFSET(name, class, attribute) Py_ssize_t name;
#define FIND(name, class, attribute)                                                                   \
    if ((self->slots.name = slot_offset(self->class, attribute)) < 0)                                  \
        return -1;

typedef struct {
    PyObject_HEAD
    Py_buffer views[NUM_COLUMNS];
    int num_held;
    Py_ssize_t rows;
    struct {
        COLUMNS(POINTER)
    } at;
    struct {
        SLOTS(OFFSET)
    } slots;
    PyObject *sequence, *chunk, *sampling, *tokens_item, *token_rows, *new_sequence; /* classes */
    PyObject *no_scores; /* what a sequence has that wants no log-probabilities of its prompt */
} Passes;

/* Borrowed. The object is of the class that the slot is of: `is_sequence` has looked. */
#define SLOT(object, name) (*(PyObject **)((char *)(object) + self->slots.name))
#define PUT(object, name, value) Py_XSETREF(SLOT(object, name), Py_NewRef(value))

static Py_ssize_t slot_offset(PyObject *class, const char *name)
{
    OWNED *found = PyObject_GetAttrString(class, name);
    if (found == NULL || !Py_IS_TYPE(found, &PyMemberDescr_Type))
        return wrong("a class has no slots");
    return ((PyMemberDescrObject *)found)->d_member->offset;
}

static int is_sequence(const Passes *self, PyObject *object)
{
    if (object != NULL && (PyObject *)Py_TYPE(object) == self->sequence)
        return 1;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "not a Sequence");
    return 0;
}

static int is_sampling(const Passes *self, PyObject *object)
{
    return (PyObject *)Py_TYPE(object) == self->sampling || wrong("a sequence has no Sampling") == 0;
}

static int bad_row(const Passes *self, Py_ssize_t row)
{
    if (row >= 0 && row < self->rows)
        return 0;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "row %zd of %zd", row, self->rows);
    return 1;
}

static int bad_rows(const Passes *self, const Py_ssize_t *rows, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (bad_row(self, rows[i]))
            return 1;
    return 0;
}

/* The row of what must be a sequence; -1 with an error. */
static Py_ssize_t row_of(const Passes *self, PyObject *sequence)
{
    Py_ssize_t row = is_sequence(self, sequence) ? PyLong_AsSsize_t(SLOT(sequence, row)) : -1;
    return bad_row(self, row) ? -1 : row;
}

/* The sequence of a row, borrowed. */
static PyObject *sequence_at(const Passes *self, PyObject *by_row, Py_ssize_t row)
{
    OWNED *key = PyLong_FromSsize_t(row);
    PyObject *sequence = key == NULL ? NULL : PyDict_GetItemWithError(by_row, key);
    if (sequence == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, key);
    return is_sequence(self, sequence) ? sequence : NULL;
}

static int passes_init(Passes *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"columns", "constants", "classes", "no_scores", NULL};
    PyObject *columns, *sequence, *chunk, *sampling, *tokens_item, *token_rows, *new_sequence, *no_scores;
    int given[10];
    const int ours[10] = {FREE,      WAITING, RUNNING, ENDING,     QUEUED,
                          RESUMED, PREFILL, DECODE,  BLOCK_SIZE, REQUEST_ID_BYTES};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!(iiiiiiiiii)(OOOOOO)O", names, &PyDict_Type,
                                     &columns, &given[0], &given[1], &given[2], &given[3], &given[4],
                                     &given[5], &given[6], &given[7], &given[8], &given[9], &sequence, &chunk, &sampling, &tokens_item, &token_rows,
                                     &new_sequence, &no_scores))
        return -1;
    if (self->num_held)
        return wrong("the columns are given once");
    if (memcmp(given, ours, sizeof ours))
        return wrong("the compiled passes know other states, or other blocks");
    while (self->num_held < NUM_COLUMNS) {
        Py_buffer *view = &self->views[self->num_held];
        const char *name = COLUMN[self->num_held].name;
        PyObject *array = PyDict_GetItemString(columns, name);
        if (array == NULL) {
            PyErr_Format(PyExc_KeyError, "%s", name);
            return -1;
        }
        int failed = hold(array, COLUMN[self->num_held].itemsize, PyBUF_WRITABLE, view);
        self->num_held += view->obj != NULL;
        if (failed)
            return -1;
        if (self->num_held == 1)
            self->rows = LENGTH(*view);
        if (LENGTH(*view) != self->rows)
            return wrong("columns of different lengths");
    }
    COLUMNS(POINT)
    self->sequence = Py_NewRef(sequence);
    self->sampling = Py_NewRef(sampling);
    self->tokens_item = Py_NewRef(tokens_item);
    self->token_rows = Py_NewRef(token_rows);
    self->new_sequence = Py_NewRef(new_sequence);
    self->chunk = Py_NewRef(chunk);
    self->no_scores = Py_NewRef(no_scores);
    SLOTS(FIND)
    return 0;
}

static void passes_dealloc(Passes *self)
{
    PyTypeObject *type = Py_TYPE(self);
    while (self->num_held)
        PyBuffer_Release(&self->views[--self->num_held]);
    Py_XDECREF(self->sequence);
    Py_XDECREF(self->sampling);
    Py_XDECREF(self->tokens_item);
    Py_XDECREF(self->token_rows);
    Py_XDECREF(self->new_sequence);
    Py_XDECREF(self->chunk);
    Py_XDECREF(self->no_scores);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------- a new row */

PyDoc_STRVAR(insert_doc,
"insert(sequence, end_token, request_id)\n\n"
"The columns of a sequence that waits in its row from now on: `Table.insert`.");

static PyObject *passes_insert(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (arguments("insert", nargs, 3) < 0)
        return NULL;
    PyObject *sequence = args[0], *request_id = args[2];
    Py_ssize_t row = row_of(self, sequence);
    if (row < 0)
        return NULL;
    PyObject *sampling = SLOT(sequence, sampling), *resumed = SLOT(sequence, resumed);
    if (!is_sampling(self, sampling))
        return NULL;
    if (!PyBytes_Check(request_id) || PyBytes_GET_SIZE(request_id) != REQUEST_ID_BYTES || !PyBytes_Check(resumed)
        || !PyTuple_Check(SLOT(sampling, predicted)))
        return wrong("ids are bytes, predicted outputs a tuple"), NULL;
    int64_t end_token = PyLong_AsLongLong(args[1]), most = PyLong_AsLongLong(SLOT(sequence, max_outputs));
    int64_t least = PyLong_AsLongLong(SLOT(sampling, min_tokens));
    int64_t prompt = PyLong_AsLongLong(SLOT(sequence, num_prompt)), rows_max = prompt + most - 1;
    int64_t predicted = prompt + PyTuple_GET_SIZE(SLOT(sampling, predicted));
    memcpy(&self->at.request_ids[row * REQUEST_ID_BYTES], BYTES(request_id), REQUEST_ID_BYTES);
    self->at.index[row] = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(SLOT(sequence, key), 1));
    self->at.attempt[row] = PyLong_AsLongLong(SLOT(sequence, attempt));
    self->at.arrival_ns[row] = PyLong_AsLongLong(SLOT(sequence, arrival_ns));
    self->at.handle[row] = PyLong_AsLongLong(SLOT(sequence, handle));
    self->at.prompt_tokens[row] = (int32_t)prompt;
    self->at.output_tokens[row] = (int32_t)(PyBytes_GET_SIZE(resumed) / 4);
    self->at.max_tokens[row] = (int32_t)most;
    self->at.min_tokens[row] = (int32_t)Py_MIN(least, most + 1);
    self->at.end_token[row] = SLOT(sampling, ignore_eos) == Py_True ? -1 : (int32_t)end_token;
    self->at.rows_max[row] = (int32_t)rows_max;
    self->at.drafted_max[row] = (int32_t)(Py_MIN(predicted, rows_max) - 1);
    self->at.slot[row] = -1;
    self->at.cached_tokens[row] = self->at.preemptions[row] = self->at.blocks[row] = 0;
    self->at.told[row] = self->at.committed[row] = self->at.planned[row] = self->at.last_token[row] = 0;
    self->at.last_plan[row] = self->at.named[row] = 0;
    self->at.phase[row] = PyBytes_GET_SIZE(resumed) ? RESUMED : QUEUED;
    self->at.state[row] = WAITING;
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* ---------------------------------------------------------------- blocks */

/* The lists of a BlockPool. */
typedef struct {
    PyObject *refs, *free;
    Py_ssize_t taken; /* from the end of `free`, not yet cut off */
} Pool;

static void leave_pool(Pool *pool)
{
    Py_XDECREF(pool->refs);
    Py_XDECREF(pool->free);
}

#define POOL __attribute__((cleanup(leave_pool))) Pool

static int enter_pool(PyObject *rank, Pool *pool)
{
    OWNED *object = get(rank, s_pool);
    if (object == NULL || (pool->refs = get_list(object, s__refs)) == NULL
        || (pool->free = get_list(object, s__free)) == NULL)
        return -1;
    return 0;
}

static Py_ssize_t block_number(const Pool *pool, PyObject *block)
{
    Py_ssize_t number = PyLong_AsSsize_t(block);
    return number >= 0 && number < PyList_GET_SIZE(pool->refs) ? number : wrong("no such block");
}

/* The next free block, borrowed, now held once. The caller knows that there is one, and cuts off the end. */
static PyObject *take_block(Pool *pool)
{
    PyObject *block = PyList_GET_ITEM(pool->free, PyList_GET_SIZE(pool->free) - ++pool->taken);
    Py_ssize_t number = block_number(pool, block);
    if (number < 0 || PyList_SetItem(pool->refs, number, Py_NewRef(one)) < 0)
        return NULL;
    return block;
}

/* One holder less for each block, the last one first. */
static int release_reversed(Pool *pool, PyObject *blocks)
{
    for (Py_ssize_t i = PyList_GET_SIZE(blocks); i-- > 0;) {
        PyObject *block = PyList_GET_ITEM(blocks, i);
        Py_ssize_t number = block_number(pool, block);
        Py_ssize_t left = number < 0 ? -1 : PyLong_AsSsize_t(PyList_GET_ITEM(pool->refs, number)) - 1;
        if (left < 0)
            return wrong("a block is free already");
        PyObject *count = PyLong_FromSsize_t(left);
        if (count == NULL || PyList_SetItem(pool->refs, number, count) < 0
            || (!left && PyList_Append(pool->free, block) < 0))
            return -1;
    }
    return 0;
}

/* ---------------------------------------------------------------- who decodes */

PyDoc_STRVAR(take_decoders_doc,
"take_decoders(rank, rows, budget, max_drafts) -> (rows, drafts, num_rows) | None\n\n"
"Of `rows` (intp, those that decode) the ones that go on: themselves if all do, else bytes. Drafts are bytes\n"
"of int32. They have got the blocks that they need: the first try of decode.py's `take_decoders`. None: there\n"
"are not enough.");

/* Blocks that a row misses for its last draft. */
static Py_ssize_t missing_blocks(const Passes *self, Py_ssize_t row, int32_t drafts)
{
    return (self->at.planned[row] + drafts) / BLOCK_SIZE + 1 - self->at.blocks[row];
}

static PyObject *blocks_of(const Passes *self, PyObject *sequence)
{
    PyObject *blocks = sequence == NULL ? NULL : SLOT(sequence, blocks);
    if (blocks != NULL && PyList_Check(blocks))
        return blocks;
    wrong("a sequence's blocks are a list");
    return NULL;
}

static int grow(Passes *self, Pool *pool, PyObject *decoding, Py_ssize_t row, Py_ssize_t count)
{
    PyObject *blocks = blocks_of(self, sequence_at(self, decoding, row));
    if (blocks == NULL)
        return -1;
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *block = take_block(pool);
        if (block == NULL || PyList_Append(blocks, block) < 0)
            return -1;
    }
    self->at.blocks[row] += (int32_t)count;
    return 0;
}

static PyObject *passes_take_decoders(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    HELD all = {0};
    if (arguments("take_decoders", nargs, 4) < 0 || hold(args[1], sizeof(Py_ssize_t), 0, &all) < 0)
        return NULL;
    Py_ssize_t budget = PyLong_AsSsize_t(args[2]), max_drafts = PyLong_AsSsize_t(args[3]);
    const int32_t *planned = self->at.planned, *rows_max = self->at.rows_max;
    const Py_ssize_t *rows = all.buf;
    Py_ssize_t count = 0, num_rows = 0, needed = 0;
    if (PyErr_Occurred() || bad_rows(self, rows, LENGTH(all)))
        return NULL;
    for (Py_ssize_t i = 0; i < LENGTH(all); i++)
        count += planned[rows[i]] < rows_max[rows[i]];
    int whole = count == LENGTH(all);
    OWNED *going = whole ? Py_NewRef(args[1]) : new_bytes(count * (Py_ssize_t)sizeof *rows);
    OWNED *drafts = new_bytes(count * 4);
    if (going == NULL || drafts == NULL)
        return NULL;
    if (!whole) {
        Py_ssize_t *kept = ROWS(going);
        for (Py_ssize_t i = 0; i < LENGTH(all); i++)
            if (planned[rows[i]] < rows_max[rows[i]])
                *kept++ = rows[i];
        rows = ROWS(going);
    }
    int32_t *draft = INTS(drafts);
    Py_ssize_t most = Py_MIN(max_drafts, budget / Py_MAX(count, 1) - 1);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t left = Py_MIN(self->at.drafted_max[rows[i]] - planned[rows[i]], most);
        draft[i] = (int32_t)Py_MAX(left, 0);
        num_rows += 1 + draft[i];
        needed += Py_MAX(missing_blocks(self, rows[i], draft[i]), 0);
    }
    if (needed) {
        POOL pool = {0};
        OWNED *decoding = get_dict(args[0], s_decoding);
        if (decoding == NULL || enter_pool(args[0], &pool) < 0)
            return NULL;
        if (needed > PyList_GET_SIZE(pool.free))
            Py_RETURN_NONE;
        for (Py_ssize_t i = 0; i < count; i++) {
            Py_ssize_t missing = missing_blocks(self, rows[i], draft[i]);
            if (missing > 0 && grow(self, &pool, decoding, rows[i], missing) < 0)
                return NULL;
        }
        if (cut_tail(pool.free, needed) < 0)
            return NULL;
    }
    return Py_BuildValue("OOn", going, drafts, num_rows);
}

/* ---------------------------------------------------------------- prompts that start whole */

/* Tokens of the first chunk of a waiting sequence, 0: it needs more thought; -1 with an error. */
static Py_ssize_t whole_tokens(Passes *self, PyObject *sequence, PyObject *begun, PyObject *stored,
                               PyObject *waiting_of, Py_ssize_t most)
{
    Py_ssize_t row = row_of(self, sequence);
    if (row < 0)
        return -1;
    Py_ssize_t tokens = PyLong_AsSsize_t(SLOT(sequence, num_prompt)) + self->at.output_tokens[row];
    if (tokens > most || SLOT(sequence, scores) != self->no_scores || PyObject_IsTrue(SLOT(sequence, stored)))
        return 0;
    if (stored != Py_None) {
        OWNED *at = PyObject_CallMethodObjArgs(stored, s_cut_at, sequence, zero, NULL);
        int cut = at == NULL ? -1 : PyObject_IsTrue(at);
        if (cut)
            return cut < 0 ? -1 : 0;
    }
    PyObject *request = PyTuple_GET_ITEM(SLOT(sequence, key), 0);
    PyObject *of_request = PyDict_GetItemWithError(waiting_of, request);
    int known = PySet_Contains(begun, request);
    if (known < 0 || of_request == NULL)
        return wrong("a waiting sequence is not among those of its request");
    return known || PyList_GET_SIZE(of_request) != 1 ? 0 : tokens;
}

/* It takes slot and blocks: `Rank.start_first` for one. */
static int start(Passes *self, PyObject *sequence, PyObject *slot, Py_ssize_t needed, Pool *pool,
                 PyObject *begun, PyObject *waiting_of)
{
    OWNED *blocks = PyList_New(needed);
    PyObject *request = PyTuple_GET_ITEM(SLOT(sequence, key), 0);
    Py_ssize_t row = row_of(self, sequence), number = PyLong_AsSsize_t(slot);
    if (blocks == NULL || PyErr_Occurred())
        return -1;
    for (Py_ssize_t k = 0; k < needed; k++) {
        PyObject *block = take_block(pool);
        if (block == NULL)
            return -1;
        PyList_SET_ITEM(blocks, k, Py_NewRef(block));
    }
    self->at.slot[row] = (int32_t)number;
    self->at.blocks[row] = (int32_t)needed;
    self->at.state[row] = RUNNING;
    self->at.phase[row] = PREFILL;
    PUT(sequence, blocks, blocks);
    PUT(sequence, slot, slot);
    return PyDict_DelItem(waiting_of, request) < 0 ? -1 : PySet_Add(begun, request);
}

PyDoc_STRVAR(start_whole_doc,
"start_whole(rank, begun, stored, room, left, most, used_max) -> (chunks, left)\n\n"
"Starts waiting sequences from the head of the queue, at most `room`, as far as they fit into `left` rows and\n"
"`most` tokens of new sequences: prefill.py's `_start_heads`.");

static PyObject *passes_start_whole(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (arguments("start_whole", nargs, 7) < 0)
        return NULL;
    PyObject *rank = args[0], *begun = args[1], *stored = args[2];
    Py_ssize_t room = PyLong_AsSsize_t(args[3]), left = PyLong_AsSsize_t(args[4]);
    Py_ssize_t most = PyLong_AsSsize_t(args[5]), count = 0;
    double used_max = PyFloat_AsDouble(args[6]);
    POOL pool = {0};
    OWNED *chunks = PyList_New(0), *slots = get_list(rank, s_free_slots);
    OWNED *waiting = get_list(rank, s_waiting), *waiting_of = get_dict(rank, s__waiting_of);
    OWNED *prefilling = get_list(rank, s_prefilling);
    if (PyErr_Occurred() || enter_pool(rank, &pool) < 0)
        return NULL;
    room = Py_MAX(Py_MIN(room, Py_MIN(PyList_GET_SIZE(waiting), PyList_GET_SIZE(slots))), 0);
    SCRATCH Py_ssize_t *tokens = PyMem_Malloc((room + 1) * sizeof *tokens);
    if (tokens == NULL)
        return PyErr_NoMemory();
    /* Who starts, before anybody does: what looks at the queues meanwhile finds them as they were. */
    Py_ssize_t used = PyList_GET_SIZE(pool.refs) - 1 - PyList_GET_SIZE(pool.free), needed = 0;
    for (; count < Py_MIN(room, PyList_GET_SIZE(waiting)); count++) {
        tokens[count] = whole_tokens(self, PyList_GET_ITEM(waiting, count), begun, stored, waiting_of,
                                     Py_MIN(left, most));
        if (tokens[count] < 0)
            return NULL;
        Py_ssize_t blocks = (tokens[count] + BLOCK_SIZE - 1) / BLOCK_SIZE;
        if (!blocks || (double)used > used_max || needed + blocks > PyList_GET_SIZE(pool.free))
            break;
        needed += blocks;
        used += blocks;
        left -= tokens[count];
        most -= tokens[count];
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *sequence = PyList_GET_ITEM(waiting, i);
        PyObject *slot = PyList_GET_ITEM(slots, PyList_GET_SIZE(slots) - 1 - i);
        Py_ssize_t blocks = (tokens[i] + BLOCK_SIZE - 1) / BLOCK_SIZE;
        OWNED *number = PyLong_FromSsize_t(tokens[i]);
        PyObject *fields[] = {sequence, zero, number, Py_True};
        if (number == NULL || start(self, sequence, slot, blocks, &pool, begun, waiting_of) < 0
            || PyList_Append(prefilling, sequence) < 0
            || push(chunks, PyObject_Vectorcall(self->chunk, fields, 4, NULL)) < 0)
            return NULL;
    }
    if (cut_tail(pool.free, needed) < 0 || cut_tail(slots, count) < 0
        || PyList_SetSlice(waiting, 0, count, NULL) < 0)
        return NULL;
    return Py_BuildValue("On", chunks, left);
}

/* ---------------------------------------------------------------- the plan */

/* What a plan says of one chunk, beside its row. */
typedef struct {
    Py_ssize_t start, count;
    int samples;
    PyObject *tokens; /* bytes, from the sequence's first token on */
} Part;

/* What a plan gathers of its chunks: plan.py's `_Chunks`. */
typedef struct {
    PyObject *sampled, *met, *new, *loads, *snapshots; /* lists */
    Part *parts;
    Py_ssize_t count, rows, squares;
    int scored;
} Chunks;

static void drop_chunks(Chunks *all)
{
    Py_XDECREF(all->sampled);
    Py_XDECREF(all->met);
    Py_XDECREF(all->new);
    Py_XDECREF(all->loads);
    Py_XDECREF(all->snapshots);
    for (Py_ssize_t k = 0; all->parts != NULL && k < all->count; k++)
        Py_XDECREF(all->parts[k].tokens);
    PyMem_Free(all->parts);
}

/* A sequence's tokens: its prompt without a copy, or all of them. */
static PyObject *tokens_of(Passes *self, PyObject *sequence, int prompt)
{
    PyObject *tokens = prompt ? Py_NewRef(SLOT(sequence, prompt)) : PyObject_CallMethodNoArgs(sequence, s_tokens);
    if (tokens != NULL && !PyBytes_Check(tokens)) {
        wrong("tokens are bytes");
        Py_CLEAR(tokens);
    }
    return tokens;
}

/* The worker meets the sequence with this chunk. */
static PyObject *introduction(Passes *self, PyObject *sequence, const Part *part, Py_ssize_t num_prompt)
{
    OWNED *tokens = tokens_of(self, sequence, part->samples && part->start + part->count == num_prompt);
    PyObject *fields[] = {SLOT(sequence, slot), SLOT(sequence, copy_key), SLOT(sequence, num_prompt),
                          SLOT(sequence, sampling), tokens};
    return tokens == NULL ? NULL : PyObject_Vectorcall(self->new_sequence, fields, 5, NULL);
}

static int gather(Passes *self, PyObject *chunk, Py_ssize_t *row, Part *part, Chunks *all)
{
    if ((PyObject *)Py_TYPE(chunk) != self->chunk)
        return wrong("not a Chunk");
    PyObject *sequence = SLOT(chunk, chunk_of);
    if ((*row = row_of(self, sequence)) < 0)
        return -1;
    Py_ssize_t num_prompt = PyLong_AsSsize_t(SLOT(sequence, num_prompt));
    part->start = PyLong_AsSsize_t(SLOT(chunk, chunk_start));
    part->count = PyLong_AsSsize_t(SLOT(chunk, chunk_count));
    part->samples = PyObject_IsTrue(SLOT(chunk, chunk_samples));
    Py_ssize_t end = part->start + part->count;
    part->tokens = tokens_of(self, sequence, end <= num_prompt);
    if (part->tokens == NULL || part->start < 0 || part->count < 0 || PyBytes_GET_SIZE(part->tokens) < 4 * end)
        return wrong("a chunk is not of the tokens of its sequence");
    all->rows += part->count;
    all->squares += part->count * part->count;
    all->scored |= SLOT(sequence, scores) != self->no_scores;
    if (part->samples && PyList_Append(all->sampled, sequence) < 0)
        return -1;
    if (PyLong_AsSsize_t(SLOT(chunk, chunk_region)) >= 0
        && push(all->snapshots, PyTuple_Pack(2, SLOT(sequence, slot), SLOT(chunk, chunk_region))) < 0)
        return -1;
    if (PyObject_IsTrue(SLOT(sequence, known)))
        return 0;
    if (SLOT(sequence, load) != Py_None && PyList_Append(all->loads, SLOT(sequence, load)) < 0)
        return -1;
    PUT(sequence, known, Py_True);
    return PyList_Append(all->met, chunk) < 0 ? -1 : push(all->new, introduction(self, sequence, part, num_prompt));
}

/* int32: the last `added[i]` blocks of each row. */
static PyObject *new_blocks(Passes *self, PyObject *by_row, const Py_ssize_t *rows, const int32_t *added, Py_ssize_t count,
                            Py_ssize_t total)
{
    OWNED *ids = new_bytes(total * 4);
    if (ids == NULL)
        return NULL;
    int32_t *id = INTS(ids);
    for (Py_ssize_t i = 0; total && i < count; i++) {
        if (added[i] <= 0)
            continue;
        PyObject *blocks = blocks_of(self, sequence_at(self, by_row, rows[i]));
        if (blocks == NULL || PyList_GET_SIZE(blocks) < added[i]) {
            wrong("more blocks are told than there are");
            return NULL;
        }
        for (Py_ssize_t k = PyList_GET_SIZE(blocks) - added[i]; k < PyList_GET_SIZE(blocks); k++)
            *id++ = (int32_t)PyLong_AsLong(PyList_GET_ITEM(blocks, k));
        if (PyErr_Occurred())
            return NULL;
    }
    return Py_NewRef(ids);
}

PyDoc_STRVAR(plan_doc,
"plan(rank, rows, drafts, chunks, seq, seen) -> (wire, rows, sampled, sequences sampled, ...)\n\n"
"The wire fields and those of the Flight, as plan.py's `_made` has them, with bytes for arrays. None for an\n"
"array that is the same as `rows`.");

static PyObject *passes_plan(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    HELD decoding = {0}, drafting = {0};
    if (arguments("plan", nargs, 6) < 0 || hold(args[1], sizeof(Py_ssize_t), 0, &decoding) < 0
        || hold(args[2], 4, 0, &drafting) < 0)
        return NULL;
    int64_t seq = PyLong_AsLongLong(args[4]), seen = PyLong_AsLongLong(args[5]);
    OWNED *table = get(args[0], s_table), *by_row = table == NULL ? NULL : get_dict(table, s_by_row);
    Py_ssize_t decoders = LENGTH(decoding), num_added = 0, num_drafts = 0, context = 0, num_sampled = 0;
    const Py_ssize_t *rows = decoding.buf;
    const int32_t *draft = drafting.buf;
    if (PyErr_Occurred() || bad_rows(self, rows, decoders))
        return NULL;
    if (!PyList_Check(args[3]) || LENGTH(drafting) != decoders) {
        wrong("chunks are a list, and each decoder has drafts or none");
        return NULL;
    }
    __attribute__((cleanup(drop_chunks))) Chunks chunks = {.count = PyList_GET_SIZE(args[3])};
    Py_ssize_t count = decoders + chunks.count;
    OWNED *every = Py_NewRef(Py_None), *sampled = Py_NewRef(Py_None);
    chunks.sampled = PyList_New(0), chunks.met = PyList_New(0), chunks.new = PyList_New(0);
    chunks.loads = PyList_New(0), chunks.snapshots = PyList_New(0);
    if (chunks.count) {
        chunks.parts = PyMem_Calloc(chunks.count, sizeof *chunks.parts);
        Py_SETREF(every, new_bytes(count * (Py_ssize_t)sizeof *rows));
        if (chunks.parts == NULL || every == NULL)
            return PyErr_NoMemory();
        Py_ssize_t *row = ROWS(every);
        memcpy(row, rows, decoders * sizeof *rows);
        for (Py_ssize_t k = 0; k < chunks.count; k++)
            if (gather(self, PyList_GET_ITEM(args[3], k), &row[decoders + k], &chunks.parts[k], &chunks) < 0)
                return NULL;
        rows = row;
    }
    OWNED *slots = new_bytes(4 * count), *starts = new_bytes(4 * count), *asked = new_bytes(4 * count);
    OWNED *added = new_bytes(4 * count), *drafts = new_bytes(count), *samples = new_bytes(count);
    OWNED *carry = new_bytes(count), *tokens = new_bytes(4 * (decoders + chunks.rows));
    if (PyErr_Occurred())
        return NULL;
    int32_t *p_slots = INTS(slots), *p_starts = INTS(starts), *p_asked = INTS(asked), *p_added = INTS(added);
    int32_t *p_tokens = INTS(tokens);
    uint8_t *p_drafts = BYTES(drafts), *p_samples = BYTES(samples), *p_carry = BYTES(carry);
    int32_t *planned = self->at.planned, *told = self->at.told;
    const int32_t *slot = self->at.slot, *blocks = self->at.blocks, *last_token = self->at.last_token;
    int64_t *last_plan = self->at.last_plan;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t row = rows[i];
        if (i < decoders) {
            p_asked[i] = draft[i] + 1;
            num_drafts += draft[i];
            p_drafts[i] = (uint8_t)draft[i];
            p_samples[i] = 1;
            p_carry[i] = last_plan[row] > seen;
            *p_tokens++ = last_token[row];
        } else {
            const Part *part = &chunks.parts[i - decoders];
            p_asked[i] = (int32_t)part->count;
            p_drafts[i] = p_carry[i] = 0;
            p_samples[i] = (uint8_t)part->samples;
            memcpy(p_tokens, INTS(part->tokens) + part->start, 4 * part->count);
            p_tokens += part->count;
        }
        p_slots[i] = slot[row];
        p_starts[i] = planned[row];
        p_added[i] = blocks[row] - told[row];
        num_added += Py_MAX(p_added[i], 0);
        num_sampled += p_samples[i];
        context += (Py_ssize_t)p_asked[i] * planned[row];
        planned[row] += p_asked[i];
        told[row] = blocks[row];
        last_plan[row] = seq;
    }
    if (num_sampled < count) {
        Py_SETREF(sampled, new_bytes(num_sampled * (Py_ssize_t)sizeof *rows));
        if (sampled == NULL)
            return NULL;
        Py_ssize_t *row = ROWS(sampled);
        for (Py_ssize_t i = 0; i < count; i++)
            if (p_samples[i])
                *row++ = rows[i];
    }
    OWNED *block_ids = new_blocks(self, by_row, rows, p_added, count, num_added);
    OWNED *new = PyList_AsTuple(chunks.new), *snapshots = PyList_AsTuple(chunks.snapshots);
    if (block_ids == NULL || new == NULL || snapshots == NULL)
        return NULL;
    return Py_BuildValue("(OOOOOOOOOOO)OOOOOOOnn", new, slots, starts, asked, drafts, samples, carry, tokens,
                         added, block_ids, snapshots, every, sampled, chunks.sampled, chunks.met,
                         chunks.loads, chunks.scored ? Py_True : Py_False, num_drafts ? Py_True : Py_False,
                         decoders + num_drafts + chunks.rows, context + chunks.squares / 2);
}

PyDoc_STRVAR(to_decode_doc,
"to_decode(rank, sequences, rows) -> bytes\n\n"
"They leave the prompts and decode: `Rank.to_decode`. `rows` (intp) without those that left, and theirs.");

static int leave_prompts(PyObject *prefilling, PyObject *sequence)
{
    for (Py_ssize_t i = PyList_GET_SIZE(prefilling); i-- > 0;)
        if (PyList_GET_ITEM(prefilling, i) == sequence)
            return PyList_SetSlice(prefilling, i, i + 1, NULL);
    return wrong("it is not in prefill");
}

static PyObject *passes_to_decode(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    HELD rows = {0}, decodes = {0};
    if (arguments("to_decode", nargs, 3) < 0 || hold(args[2], sizeof(Py_ssize_t), 0, &rows) < 0
        || hold_of(args[0], s_decodes, 1, PyBUF_WRITABLE, &decodes) < 0)
        return NULL;
    OWNED *prefilling = get_list(args[0], s_prefilling), *decoding = get_dict(args[0], s_decoding);
    PyObject *sequences = args[1];
    const Py_ssize_t *row = rows.buf;
    uint8_t *flags = decodes.buf;
    if (prefilling == NULL || decoding == NULL || bad_rows(self, row, LENGTH(rows)))
        return NULL;
    if (!PyList_Check(sequences) || LENGTH(decodes) != self->rows) {
        wrong("sequences are a list, and each row has a flag");
        return NULL;
    }
    Py_ssize_t count = 0, more = PyList_GET_SIZE(sequences);
    for (Py_ssize_t i = 0; i < LENGTH(rows); i++)
        count += flags[row[i]];
    OWNED *now = new_bytes((count + more) * (Py_ssize_t)sizeof *row);
    if (now == NULL)
        return NULL;
    Py_ssize_t *to = ROWS(now);
    for (Py_ssize_t i = 0; i < LENGTH(rows); i++)
        if (flags[row[i]])
            *to++ = row[i];
    for (Py_ssize_t i = more; i-- > 0;) /* nearly always they are the last ones there */
        if (leave_prompts(prefilling, PyList_GET_ITEM(sequences, i)) < 0)
            return NULL;
    for (Py_ssize_t i = 0; i < more; i++) {
        PyObject *sequence = PyList_GET_ITEM(sequences, i);
        Py_ssize_t at = row_of(self, sequence);
        if (at < 0 || PyDict_SetItem(decoding, SLOT(sequence, row), sequence) < 0)
            return NULL;
        *to++ = at;
        flags[at] = 1;
        self->at.phase[at] = DECODE;
    }
    return Py_NewRef(now);
}

/* ---------------------------------------------------------------- a step's result */

/* A row gets a region of twice the size for its outputs: outputs.py's `_enlarge`. */
static int enlarge(Passes *self, PyObject *outputs, Py_ssize_t row, int32_t have)
{
    int32_t room = self->at.room[row], size = 2 * room;
    int64_t base = self->at.base[row], to;
    OWNED *regions = get_dict(outputs, s__free); /* makes the list of a size that it does not have yet */
    OWNED *old = PyLong_FromLong(room), *new = PyLong_FromLong(size);
    if (regions == NULL || old == NULL || new == NULL)
        return -1;
    OWNED *of_new = PyObject_GetItem(regions, new), *of_old = PyObject_GetItem(regions, old);
    if (of_new == NULL || of_old == NULL || !PyList_Check(of_new) || !PyList_Check(of_old))
        return wrong("regions are lists");
    if (PyList_GET_SIZE(of_new)) {
        to = PyLong_AsLongLong(PyList_GET_ITEM(of_new, PyList_GET_SIZE(of_new) - 1));
        if (cut_tail(of_new, 1) < 0)
            return -1;
    } else {
        to = get_index(outputs, s__end);
        OWNED *end = PyLong_FromLongLong(to + size);
        OWNED *done = end == NULL ? NULL : PyObject_CallMethodOneArg(outputs, s__grow, end);
        if (done == NULL || set(outputs, s__end, end) < 0)
            return -1;
    }
    HELD data = {0};
    if (hold_of(outputs, s__data, 4, PyBUF_WRITABLE, &data) < 0)
        return -1;
    if (base < 0 || to < 0 || base + have > LENGTH(data) || to + have > LENGTH(data))
        return wrong("outputs beyond their region");
    memcpy((int32_t *)data.buf + to, (int32_t *)data.buf + base, 4 * (size_t)have);
    self->at.base[row] = to;
    self->at.room[row] = size;
    self->at.mark[row] = Py_MIN(size, self->at.max_tokens[row]);
    return push(of_old, PyLong_FromLongLong(base));
}

/* What the plan asked for becomes what was computed: commit.py's `_settle`. */
static int settle(Passes *self, PyObject *flight, const uint8_t *counts, Py_ssize_t num_counts)
{
    HELD rows = {0}, asked = {0};
    OWNED *decoders = get(flight, s_decoders), *decoding = decoders == NULL ? NULL : get(decoders, s_rows);
    Py_ssize_t num_decoders = decoding == NULL ? -1 : PyObject_Size(decoding);
    int drafted = get_truth(flight, s_drafted);
    if (num_decoders < 0 || drafted < 0 || hold_of(flight, s_rows, sizeof(Py_ssize_t), 0, &rows) < 0
        || hold_of(flight, s_asked, 4, 0, &asked) < 0 || bad_rows(self, rows.buf, LENGTH(rows)))
        return -1;
    if (LENGTH(asked) != LENGTH(rows) || num_counts < num_decoders)
        return wrong("a flight's arrays are not parallel");
    const Py_ssize_t *row = rows.buf;
    const int32_t *wanted = asked.buf;
    for (Py_ssize_t i = 0; i < LENGTH(rows); i++) {
        /* A row whose sample failed was computed, too. */
        int32_t computed = drafted && i < num_decoders ? Py_MAX(counts[i], 1) : wanted[i];
        self->at.committed[row[i]] += computed;
        self->at.planned[row[i]] += computed - wanted[i];
    }
    return 0;
}

/* What becomes of one place of a step. */
typedef struct {
    PyObject *reason; /* borrowed; NULL: it goes on */
    int32_t have, count; /* outputs before, and the new tokens that count */
    int odd; /* it is told as an item */
} Place;

/* Whether the token ends the sequence of the row. */
static int is_stop(PyObject *of_rows, Py_ssize_t row, int32_t token)
{
    OWNED *tokens = get(PyList_GET_ITEM(of_rows, row), s_tokens), *number = PyLong_FromLong(token);
    return tokens == NULL || number == NULL ? -1 : PySequence_Contains(tokens, number);
}

/* Writes tokens behind the outputs of a row. Whether one of them would end some sequence. */
static int append(int32_t *to, const int32_t *tokens, int32_t count, const uint8_t *ends_any, int32_t num_marks)
{
    int found = 0;
    for (int32_t k = 0; k < count; k++) {
        int32_t token = to[k] = tokens[k];
        found |= token >= 0 && token < num_marks && ends_any[token];
    }
    return found;
}

/* Whether a sequence ends with its new tokens, and with which: commit.py's `_ends`. */
static int find_end(Passes *self, Place *place, Py_ssize_t row, const int32_t *tokens, int perhaps_stops,
                    PyObject *of_rows)
{
    int32_t least = self->at.min_tokens[row], most = self->at.max_tokens[row];
    if (self->at.state[row] != RUNNING)
        return 0;
    for (int32_t k = 0; perhaps_stops && k < place->count; k++) {
        int32_t token = tokens[k], nth = place->have + k + 1;
        if (nth < least || nth > most)
            continue;
        int stops = is_stop(of_rows, row, token);
        if (stops < 0)
            return -1;
        if (stops) {
            place->reason = s_stop;
            place->count = k + 1;
            return 0;
        }
    }
    if (place->have + place->count >= most) {
        place->reason = s_length;
        place->count = most - place->have;
    }
    return 0;
}

/* New tokens of a sequence that the gateway does not know by its handle, or that ends: `_say_items`. */
static int say(Passes *self, PyObject *sequence, Py_ssize_t row, const Place *place, const int32_t *tokens,
               PyObject *items)
{
    OWNED *ids = PyTuple_New(place->count), *offset = PyLong_FromLong(place->have);
    if (ids == NULL || offset == NULL)
        return -1;
    for (int32_t k = 0; k < place->count; k++) {
        PyObject *id = PyLong_FromLong(tokens[k]);
        if (id == NULL)
            return -1;
        PyTuple_SET_ITEM(ids, k, id);
    }
    PyObject *key = SLOT(sequence, key), *reason = place->reason == NULL ? Py_None : place->reason;
    PyObject *fields[] = {PyTuple_GET_ITEM(key, 0), PyTuple_GET_ITEM(key, 1), SLOT(sequence, attempt),
                          offset, ids, reason, Py_None, s_empty, SLOT(sequence, cached), no_tuple,
                          SLOT(sequence, handle)};
    if (push(items, PyObject_Vectorcall(self->tokens_item, fields, 11, NULL)) < 0)
        return -1;
    if (place->reason != NULL)
        return 0;
    PyObject *sampling = SLOT(sequence, sampling);
    if (!is_sampling(self, sampling))
        return -1;
    int plain = SLOT(sampling, logprobs) == Py_None;
    if (plain && SLOT(sequence, scores) != self->no_scores)
        plain = get_truth(sequence, s_plain);
    if (plain > 0) /* it goes on as a row */
        self->at.named[row] = 1;
    return plain < 0 ? -1 : 0;
}

/* The tokens of those that are not odd. */
static PyObject *say_rows(Passes *self, const Place *places, const Py_ssize_t *rows, Py_ssize_t count,
                          Py_ssize_t plain, PyObject *counts, PyObject *tokens)
{
    const uint8_t *counted = BYTES(counts);
    const int32_t *token = INTS(tokens);
    Py_ssize_t num_tokens = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        num_tokens += places[i].odd ? 0 : counted[i];
    int all = plain == count;
    OWNED *handles = new_bytes(8 * plain), *offsets = new_bytes(4 * plain);
    OWNED *lengths = all ? Py_NewRef(counts) : new_bytes(plain);
    OWNED *ids = all ? Py_NewRef(tokens) : new_bytes(4 * num_tokens);
    if (handles == NULL || offsets == NULL || lengths == NULL || ids == NULL)
        return NULL;
    int64_t *handle = (int64_t *)PyBytes_AS_STRING(handles);
    int32_t *offset = INTS(offsets), *id = INTS(ids);
    uint8_t *length = BYTES(lengths);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (places[i].odd)
            continue;
        *handle++ = self->at.handle[rows[i]];
        *offset++ = places[i].have;
    }
    for (Py_ssize_t i = 0; !all && i < count; i++) { /* stretches between the odd ones */
        Py_ssize_t tokens_here = 0;
        for (; i < count && !places[i].odd; i++) {
            *length++ = counted[i];
            tokens_here += counted[i];
        }
        memcpy(id, token, 4 * tokens_here);
        id += tokens_here;
        token += tokens_here + (i < count ? counted[i] : 0);
    }
    PyObject *fields[] = {handles, offsets, lengths, ids};
    return PyObject_Vectorcall(self->token_rows, fields, 4, NULL);
}

PyDoc_STRVAR(commit_doc,
"commit(table, flight, result) -> (rows, items, ended, unsaid, failed)\n\n"
"As commit.py's `_commit`, for a step without log-probabilities. `failed`: (sequence, status) of those whose\n"
"sample failed.");

static PyObject *passes_commit(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (arguments("commit", nargs, 3) < 0)
        return NULL;
    PyObject *table = args[0], *flight = args[1], *result = args[2];
    HELD sampled = {0}, marks = {0}, data = {0};
    OWNED *counts = get_bytes(result, s_counts), *tokens = get_bytes(result, s_tokens);
    OWNED *status = get_bytes(result, s_status), *by_row = get_dict(table, s_by_row);
    OWNED *outputs = get(table, s_outputs), *stop_ids = get(table, s_stop_ids);
    OWNED *of_rows = stop_ids == NULL ? NULL : get_list(stop_ids, s__of);
    OWNED *items = PyList_New(0), *stopped = PyList_New(0), *filled = PyList_New(0);
    OWNED *unsaid = PyList_New(0), *failed = PyList_New(0);
    if (PyErr_Occurred() || hold_of(flight, s_sampled, sizeof(Py_ssize_t), 0, &sampled) < 0
        || hold_of(stop_ids, s__ends_any, 1, 0, &marks) < 0)
        return NULL;
    const uint8_t *counted = BYTES(counts), *states = BYTES(status);
    const int32_t *token = INTS(tokens);
    const Py_ssize_t *rows = sampled.buf, count = LENGTH(sampled);
    Py_ssize_t total = 0, at = 0, num_plain = 0;
    if (PyBytes_GET_SIZE(counts) != count || PyBytes_GET_SIZE(status) != count)
        return wrong("not of this plan"), NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        total += counted[i];
    if (count && 4 * total != PyBytes_GET_SIZE(tokens))
        return wrong("the result's counts are not its tokens"), NULL;
    if (PyList_GET_SIZE(of_rows) != self->rows)
        return wrong("each row has stop ids"), NULL;
    SCRATCH Place *places = PyMem_Malloc((count + 1) * sizeof *places);
    if (places == NULL)
        return PyErr_NoMemory();
    if (bad_rows(self, rows, count) || settle(self, flight, counted, count) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        places[i] = (Place){NULL, self->at.output_tokens[rows[i]], counted[i], 0};
        if (places[i].have + counted[i] > self->at.room[rows[i]]
            && enlarge(self, outputs, rows[i], places[i].have) < 0)
            return NULL;
    }
    if (hold_of(outputs, s__data, 4, PyBUF_WRITABLE, &data) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Place *place = &places[i];
        Py_ssize_t row = rows[i], to = self->at.base[row] + place->have;
        if (to < 0 || to + counted[i] > LENGTH(data))
            return wrong("outputs beyond their region"), NULL;
        int stops = append((int32_t *)data.buf + to, token + at, counted[i], marks.buf, (int32_t)marks.len);
        if (find_end(self, place, row, token + at, stops, of_rows) < 0)
            return NULL;
        self->at.output_tokens[row] = place->have + counted[i];
        place->odd = !self->at.named[row] || place->reason != NULL || !counted[i];
        num_plain += !place->odd;
        at += counted[i];
        if (total) /* where there is none it does not matter: then the sequence ends */
            self->at.last_token[row] = token[(at ? at : total) - 1];
    }
    for (Py_ssize_t i = at = 0; num_plain < count && i < count; at += counted[i], i++) {
        const Place *place = &places[i];
        if (!place->odd)
            continue;
        if (self->at.state[rows[i]] != RUNNING) { /* it ended while the step was under way */
            self->at.output_tokens[rows[i]] = place->have;
            continue;
        }
        PyObject *sequence = sequence_at(self, by_row, rows[i]);
        if (sequence == NULL)
            return NULL;
        if (place->reason != NULL) {
            self->at.output_tokens[rows[i]] = place->have + place->count;
            PyObject *end = PyTuple_Pack(4, sequence, place->reason, Py_None, s_empty);
            if (push(place->reason == s_stop ? stopped : filled, end) < 0
                || (!place->count && PyList_Append(unsaid, sequence) < 0))
                return NULL;
        }
        if (place->count && say(self, sequence, rows[i], place, token + at, items) < 0)
            return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!states[i] || places[i].reason != NULL || self->at.state[rows[i]] != RUNNING)
            continue;
        PyObject *sequence = sequence_at(self, by_row, rows[i]);
        if (sequence == NULL || push(failed, Py_BuildValue("Oi", sequence, states[i])) < 0)
            return NULL;
    }
    OWNED *said = num_plain ? say_rows(self, places, rows, count, num_plain, counts, tokens) : Py_NewRef(Py_None);
    if (said == NULL || PyList_SetSlice(stopped, PyList_GET_SIZE(stopped), PyList_GET_SIZE(stopped), filled) < 0)
        return NULL;
    return PyTuple_Pack(5, said, items, stopped, unsaid, failed);
}

/* ---------------------------------------------------------------- ends */

/* 1: all of them decode. 0: not all; -1 with an error. */
static int all_decode(Passes *self, PyObject *ended, PyObject *decoding)
{
    int decode = 1;
    for (Py_ssize_t i = 0; decode == 1 && i < PyList_GET_SIZE(ended); i++) {
        PyObject *sequence = PyTuple_GET_ITEM(PyList_GET_ITEM(ended, i), 0);
        decode = is_sequence(self, sequence) ? PyDict_Contains(decoding, SLOT(sequence, row)) : -1;
    }
    return decode;
}

/* Its row; -1 with an error. */
static Py_ssize_t end(Passes *self, PyObject *ended, PyObject *decoding, uint8_t *decodes, PyObject *kept,
                      PyObject *now_ns, PyObject *due_ns)
{
    PyObject *sequence = PyTuple_GET_ITEM(ended, 0), *code = PyTuple_GET_ITEM(ended, 2);
    Py_ssize_t row = row_of(self, sequence);
    if (row < 0)
        return -1;
    if (SLOT(sequence, finish) != Py_None)
        return wrong("it has ended before");
    PUT(sequence, finish, PyTuple_GET_ITEM(ended, 1));
    if (code != Py_None) {
        PUT(sequence, code, code);
        PUT(sequence, error, PyTuple_GET_ITEM(ended, 3));
    }
    PUT(sequence, finished_ns, now_ns);
    PUT(sequence, final_due_ns, due_ns);
    if (PyObject_SetItem(kept, SLOT(sequence, key), sequence) < 0
        || PyDict_DelItem(decoding, SLOT(sequence, row)) < 0)
        return -1;
    decodes[row] = 0;
    return row;
}

PyDoc_STRVAR(finish_doc,
"finish(rank, ended, kept, now_ns, due_ns) -> (fences, over) | None\n\n"
"Ends sequences that decode. `fences`: [(plan under way, sequences)], neighbours of one plan together;\n"
"`over`: those that no plan under way contains: core.py's `_finish_all`. None: one of them does not decode.");

static PyObject *passes_finish(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    HELD decodes = {0};
    if (arguments("finish", nargs, 5) < 0 || hold_of(args[0], s_decodes, 1, PyBUF_WRITABLE, &decodes) < 0)
        return NULL;
    PyObject *ended = args[1], *group = NULL;
    OWNED *decoding = get_dict(args[0], s_decoding), *fences = PyList_New(0), *over = PyList_New(0);
    int64_t seen = get_index(args[0], s_seen), last = 0;
    if (PyErr_Occurred())
        return NULL;
    if (LENGTH(decodes) != self->rows || !PyList_Check(ended))
        return wrong("each row has a flag, and `ended` is a list"), NULL;
    int decode = all_decode(self, ended, decoding);
    if (decode < 1)
        return decode < 0 ? NULL : Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ended); i++) {
        PyObject *ending = PyList_GET_ITEM(ended, i), *sequence = PyTuple_GET_ITEM(ending, 0);
        Py_ssize_t row = end(self, ending, decoding, decodes.buf, args[2], args[3], args[4]);
        if (row < 0)
            return NULL;
        int64_t plan = self->at.last_plan[row];
        if (plan <= seen) {
            if (PyList_Append(over, sequence) < 0)
                return NULL;
            continue;
        }
        self->at.state[row] = ENDING;
        self->at.named[row] = 0;
        if (group == NULL || plan != last) {
            group = PyList_New(0); /* `fences` holds it */
            if (group == NULL || push(fences, Py_BuildValue("LN", (long long)plan, group)) < 0)
                return NULL;
            last = plan;
        }
        if (PyList_Append(group, sequence) < 0)
            return NULL;
    }
    return PyTuple_Pack(2, fences, over);
}

PyDoc_STRVAR(free_doc, "free(rank, sequences)\n\nBlocks and slots back: `Rank.free`.");

static PyObject *passes_free(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (arguments("free", nargs, 2) < 0)
        return NULL;
    POOL pool = {0};
    OWNED *slots = get_list(args[0], s_free_slots);
    if (slots == NULL || enter_pool(args[0], &pool) < 0)
        return NULL;
    if (!PyList_Check(args[1]))
        return wrong("sequences are a list"), NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); i++) {
        PyObject *sequence = PyList_GET_ITEM(args[1], i);
        OWNED *none = PyList_New(0);
        if (none == NULL || !is_sequence(self, sequence) || blocks_of(self, sequence) == NULL
            || release_reversed(&pool, blocks_of(self, sequence)) < 0)
            return NULL;
        PUT(sequence, blocks, none);
        if (PyLong_AsSsize_t(SLOT(sequence, slot)) < 0)
            continue;
        if (PyList_Append(slots, SLOT(sequence, slot)) < 0)
            return NULL;
        PUT(sequence, slot, minus_one);
    }
    Py_RETURN_NONE;
}

/* The region of a row is given back: outputs.py's `close`. Its outputs, as bytes. */
static PyObject *close_outputs(Passes *self, Py_ssize_t row, const Py_buffer *data, PyObject *regions)
{
    int64_t base = self->at.base[row], count = self->at.output_tokens[row];
    OWNED *room = PyLong_FromLong(self->at.room[row]);
    OWNED *of_size = room == NULL ? NULL : PyObject_GetItem(regions, room);
    if (of_size == NULL || !PyList_Check(of_size) || base < 0 || count < 0 || base + count > LENGTH(*data))
        return wrong("outputs beyond their region"), NULL;
    if (push(of_size, PyLong_FromLongLong(base)) < 0)
        return NULL;
    return PyBytes_FromStringAndSize((const char *)data->buf + 4 * base, 4 * count);
}

/* One row less has its stop ids: stops.py's `close`, which the last one is left to. */
static int close_stop_ids(PyObject *stop_ids, PyObject *of_rows, PyObject *row)
{
    PyObject *ids = PyList_GET_ITEM(of_rows, PyLong_AsSsize_t(row));
    Py_ssize_t count = get_index(ids, s_rows);
    if (count > 1) {
        OWNED *left = PyLong_FromSsize_t(count - 1);
        return left == NULL ? -1 : set(ids, s_rows, left);
    }
    OWNED *rows = PyErr_Occurred() ? NULL : Py_BuildValue("[O]", row);
    OWNED *done = rows == NULL ? NULL : PyObject_CallMethodOneArg(stop_ids, s_close, rows);
    return done == NULL ? -1 : 0;
}

PyDoc_STRVAR(remove_doc, "remove(table, sequences)\n\nRows back: `Table.remove`.");

static PyObject *passes_remove(Passes *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (arguments("remove", nargs, 2) < 0)
        return NULL;
    HELD data = {0};
    OWNED *by_row = get_dict(args[0], s_by_row), *free_rows = get_list(args[0], s__free);
    OWNED *outputs = get(args[0], s_outputs), *stop_ids = get(args[0], s_stop_ids);
    OWNED *regions = outputs == NULL ? NULL : get_dict(outputs, s__free);
    OWNED *of_rows = stop_ids == NULL ? NULL : get_list(stop_ids, s__of);
    if (PyErr_Occurred() || hold_of(outputs, s__data, 4, 0, &data) < 0)
        return NULL;
    if (!PyList_Check(args[1]) || PyList_GET_SIZE(of_rows) != self->rows)
        return wrong("sequences are a list, and each row has stop ids"), NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); i++) {
        PyObject *sequence = PyList_GET_ITEM(args[1], i);
        Py_ssize_t row = row_of(self, sequence);
        OWNED *ended = row < 0 ? NULL : close_outputs(self, row, &data, regions);
        if (ended == NULL || close_stop_ids(stop_ids, of_rows, SLOT(sequence, row)) < 0
            || PyList_Append(free_rows, SLOT(sequence, row)) < 0
            || PyDict_DelItem(by_row, SLOT(sequence, row)) < 0)
            return NULL;
        PUT(sequence, ended, ended);
        PUT(sequence, table, Py_None);
        PUT(sequence, row, minus_one);
        self->at.state[row] = FREE;
    }
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- the module */

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))passes_##name, METH_FASTCALL, name##_doc}
static PyMethodDef methods[] = {METHOD(insert), METHOD(take_decoders), METHOD(start_whole), METHOD(plan), METHOD(to_decode),
                                METHOD(commit), METHOD(finish), METHOD(free), METHOD(remove), {0}};
static PyType_Slot slots[] = {{Py_tp_new, PyType_GenericNew}, {Py_tp_init, passes_init},
                              {Py_tp_dealloc, passes_dealloc}, {Py_tp_methods, methods},
                              {Py_tp_doc, "The passes over the rows of one table."}, {0}};
static PyType_Spec spec = {"phalanx.scheduler_svc._rows.Passes", sizeof(Passes), 0, Py_TPFLAGS_DEFAULT, slots};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", "Compiled passes of the scheduler.", -1,
                                    .m_methods = NULL};

PyMODINIT_FUNC PyInit__rows(void)
{
#define INTERN(name)                                                                                   \
    if ((s_##name = PyUnicode_InternFromString(#name)) == NULL)                                        \
        return NULL;
    NAMES(INTERN)
    INTERN(stop)
    INTERN(length)
    s_empty = PyUnicode_InternFromString("");
    no_tuple = PyTuple_New(0);
    zero = PyLong_FromLong(0);
    one = PyLong_FromLong(1);
    minus_one = PyLong_FromLong(-1);
    OWNED *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (PyErr_Occurred() || PyModule_AddObjectRef(made, "Passes", type) < 0)
        return NULL;
    return Py_NewRef(made);
}
