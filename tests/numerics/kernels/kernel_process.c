/* Calls the kernel in a process of its own, as tests/numerics/kernels/kernel_process.py asks on standard input: for another
 * processor, under an emulator, or with a sanitizer that has to be there from the start of a process.
 *
 *     kernel_process LIBRARY THREADS
 *
 * A call is the name of a function, the blocks of memory that it reads and writes, the pointers from block to block, and
 * the arguments. It is made by THREADS threads at once. They share the blocks that are only read; each has its own of the
 * others. The answer is that of the first thread: what the function returned, and each block that it wrote. Every block
 * is an allocation of its own, so that a sanitizer knows its ends, and begins at the same place between two multiples of
 * 16 as where it came from.
 */

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME = 32, ALIGNMENT = 16, MOST = 64 };

enum use { SHARED, OWN, ANSWER }; /* by all threads, by one, by one and sent back */

struct block {
    int64_t bytes, offset, use;
    unsigned char *allocated;
};

struct pointer {
    int64_t block, at, to;
};

struct argument {
    int64_t is_block, value;
};

static struct {
    char name[NAME];
    int64_t blocks, pointers, arguments;
} call;
static struct block blocks[MOST];
static struct pointer pointers[MOST];
static struct argument arguments[MOST];
static void *function;

struct thread {
    pthread_t id;
    unsigned char *own[MOST], *at[MOST];
    int64_t result;
};

static void die(const char *what)
{
    fprintf(stderr, "kernel_process: %s\n", what);
    exit(2);
}

static void take(void *to, size_t bytes)
{
    if (bytes && fread(to, bytes, 1, stdin) != 1) die("the call ends early");
}

static void give(const void *from, size_t bytes)
{
    if (bytes && fwrite(from, bytes, 1, stdout) != 1) die("nobody reads the answer");
}

static unsigned char *allocate(const struct block *block)
{
    unsigned char *allocated = malloc((size_t)(block->offset + block->bytes));
    if (!allocated || (uintptr_t)allocated % ALIGNMENT) die("no memory, or not aligned");
    return allocated;
}

static int64_t number(int i) { return arguments[i].value; }

static void *address(const struct thread *t, int i)
{
    if (!arguments[i].is_block) die("a number for an address");
    return t->at[arguments[i].value];
}

#define N(i) number(i)
#define I(i) (int)number(i)
#define A(i) address(t, i)

static void *run(void *argument)
{
    struct thread *t = argument;
    if (!strcmp(call.name, "consistency_source")) {
        t->result = ((uint32_t(*)(void))function)();
    } else if (!strcmp(call.name, "consistency_variants")) {
        t->result = ((int (*)(void))function)();
    } else if (!strcmp(call.name, "consistency_measure")) {
        ((void (*)(int, int, int, void *, void *, int64_t, int64_t, void *, void *, void *))function)(
            I(0), I(1), I(2), A(3), A(4), N(5), N(6), A(7), A(8), A(9));
    } else if (!strcmp(call.name, "consistency_errors")) {
        t->result = ((int64_t(*)(int, int, void *, int64_t, int64_t, int64_t, void *, void *, void *, void *))function)(
            I(0), I(1), A(2), N(3), N(4), N(5), A(6), A(7), A(8), A(9));
    } else if (!strcmp(call.name, "consistency_digest")) {
        ((void (*)(int, void *, int64_t, void *, void *, void *))function)(I(0), A(1), N(2), A(3), A(4), A(5));
    } else {
        die("a function that is not known here");
    }
    return NULL;
}

static void prepare(struct thread *t)
{
    for (int i = 0; i < call.blocks; i++) {
        t->own[i] = blocks[i].use == SHARED ? NULL : allocate(blocks + i);
        t->at[i] = (t->own[i] ? t->own[i] : blocks[i].allocated) + blocks[i].offset;
        if (t->own[i]) memcpy(t->at[i], blocks[i].allocated + blocks[i].offset, (size_t)blocks[i].bytes);
    }
    for (int i = 0; i < call.pointers; i++) {
        const struct pointer *p = pointers + i;
        if (!t->own[p->block]) die("a pointer in a shared block");
        memcpy(t->at[p->block] + p->at, t->at + p->to, sizeof t->at[0]);
    }
}

int main(int count, char **words)
{
    if (count != 3) die("LIBRARY THREADS");
    const int many = atoi(words[2]);
    void *library = dlopen(words[1], RTLD_NOW);
    if (!library) die(dlerror());
    struct thread *threads = calloc((size_t)many, sizeof *threads);
    if (many < 1 || !threads) die("no threads");
    while (fread(&call, sizeof call, 1, stdin) == 1) {
        if (call.blocks > MOST || call.pointers > MOST || call.arguments > MOST) die("a call that is too large");
        for (int i = 0; i < call.blocks; i++) {
            take(blocks + i, offsetof(struct block, allocated));
            blocks[i].allocated = allocate(blocks + i);
            take(blocks[i].allocated + blocks[i].offset, (size_t)blocks[i].bytes);
        }
        take(pointers, (size_t)call.pointers * sizeof *pointers);
        take(arguments, (size_t)call.arguments * sizeof *arguments);
        function = dlsym(library, call.name);
        if (!function) die("a function that the library has not");
        for (int i = 0; i < many; i++) prepare(threads + i);
        for (int i = 1; i < many; i++)
            if (pthread_create(&threads[i].id, NULL, run, threads + i)) die("a thread cannot be started");
        run(threads);
        for (int i = 1; i < many; i++) pthread_join(threads[i].id, NULL);
        give(&threads[0].result, sizeof threads[0].result);
        for (int i = 0; i < call.blocks; i++) {
            for (int j = 1; j < many && blocks[i].use == ANSWER; j++)
                if (memcmp(threads[j].at[i], threads[0].at[i], (size_t)blocks[i].bytes)) die("threads with unlike answers");
            if (blocks[i].use == ANSWER) give(threads[0].at[i], (size_t)blocks[i].bytes);
        }
        if (fflush(stdout)) die("nobody reads the answer");
        for (int i = 0; i < call.blocks; i++) {
            for (int j = 0; j < many; j++) free(threads[j].own[i]);
            free(blocks[i].allocated);
        }
    }
    free(threads);
    return 0; /* with the library still there: a report names its functions */
}
