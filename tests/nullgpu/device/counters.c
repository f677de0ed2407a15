// What was called, how often, in which phase. The table is a file of fixed rows that is mapped, so that a
// process that is killed leaves its counts; ../counts.py reads it.
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ROWS (1 << 14)
#define MOST_FRAMES 6

struct row {
    uint64_t count;
    uint64_t bytes;
    char kind[16];
    char phase[32];
    char what[192];
};

static struct row *table;
static char phase[sizeof table->phase] = "start";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int open_record(const char *suffix, int flags) {
    char path[512];
    snprintf(path, sizeof path, "%s/%d.%s", settings.record, getpid(), suffix);
    return open(path, flags | O_CREAT | O_CLOEXEC, 0644);
}

static void open_table(void) {
    int file = settings.record ? open_record("counts", O_RDWR) : -1;
    if (file >= 0 && ftruncate(file, ROWS * sizeof *table))
        file = -1;
    int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *mapped = mmap(NULL, ROWS * sizeof *table, PROT_READ | PROT_WRITE, flags, file, 0);
    table = mapped == MAP_FAILED ? NULL : mapped;
    if (file >= 0)
        close(file);
}

static void forked(void) {
    pthread_mutex_init(&lock, NULL);
    table = NULL;
}

__attribute__((constructor(102))) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

// The row of a key; NULL when the table is full. Called under the lock.
static struct row *row_of(const char *kind, const char *what) {
    if (!table)
        open_table();
    uint64_t hash = 14695981039346656037u;
    for (const char *s = what; *s && s < what + sizeof table->what - 1; s++)
        hash = (hash ^ (unsigned char)*s) * 1099511628211u;
    for (const char *s = phase; *s; s++)
        hash = (hash ^ (unsigned char)*s) * 1099511628211u;
    hash ^= (uint64_t)kind[0] << 8;
    for (int i = 0; table && i < ROWS; i++) {
        struct row *row = &table[(hash + i) % ROWS];
        if (!row->count) {
            snprintf(row->kind, sizeof row->kind, "%s", kind);
            snprintf(row->phase, sizeof row->phase, "%s", phase);
            snprintf(row->what, sizeof row->what, "%s", what);
            return row;
        }
        bool same = !strncmp(row->what, what, sizeof row->what - 1) && !strcmp(row->kind, kind);
        if (same && !strcmp(row->phase, phase))
            return row;
    }
    return NULL;
}

static uint64_t add(const char *kind, const char *what, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct row *row = row_of(kind, what);
    uint64_t before = row ? row->count : 1;
    if (row) {
        row->count++;
        row->bytes += bytes;
    }
    pthread_mutex_unlock(&lock);
    return before;
}

void count(const char *kind, const char *what, size_t bytes) { add(kind, what, bytes); }

// The calling thread's Python frames, innermost first, as "FILE:LINE FUNCTION < ...". CPython's own dump for
// crashes needs no interpreter lock, which a thread that waits for the device has given back.
static void python_frames(char *out, size_t room) {
    static void *(*state)(void);
    static void (*dump)(int, void *);
    if (!dump) {
        state = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
        dump = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    }
    *out = 0;
    void *thread = state ? state() : NULL;
    if (!thread || !dump)
        return;
    char text[16384];
    int file = memfd_create("frames", MFD_CLOEXEC);
    dump(file, thread);
    ssize_t got = pread(file, text, sizeof text - 1, 0);
    close(file);
    text[got > 0 ? got : 0] = 0;
    int frames = 0;
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line && frames < MOST_FRAMES;
         line = strtok_r(NULL, "\n", &rest)) {
        char name[256], function[128];
        int number;
        if (sscanf(line, "  File \"%255[^\"]\", line %d in %127s", name, &number, function) != 3)
            continue;
        const char *package = strstr(name, "site-packages/");
        const char *shown = package ? package + strlen("site-packages/") : name;
        size_t length = strlen(out);
        snprintf(out + length, room - length, "%s%s:%d %s", frames ? " < " : "", shown, number, function);
        frames++;
    }
}

void count_wait(const char *what) {
    count("wait", what, 0);
    if (!settings.callers || !settings.record)
        return;
    char frames[2048];
    python_frames(frames, sizeof frames);
    uint64_t hash = 14695981039346656037u;
    for (const char *s = frames; *s; s++)
        hash = (hash ^ (unsigned char)*s) * 1099511628211u;
    char key[64];
    snprintf(key, sizeof key, "%s %016lx", what, (unsigned long)hash);
    if (add("caller", key, 0))
        return;
    int file = open_record("callers", O_WRONLY | O_APPEND);
    if (file >= 0) {
        dprintf(file, "%016lx\t%s\n", (unsigned long)hash, *frames ? frames : "no Python frame");
        close(file);
    }
}

void note_collective(const char *line) {
    if (!settings.record)
        return;
    int file = open_record("collectives", O_WRONLY | O_APPEND);
    if (file >= 0) {
        dprintf(file, "%s\t%s\n", phase, line);
        close(file);
    }
}

// --- what Python calls through ctypes

// Names the phase that follows; it holds for the whole process.
void nullgpu_phase(const char *name) {
    pthread_mutex_lock(&lock);
    snprintf(phase, sizeof phase, "%s", name);
    pthread_mutex_unlock(&lock);
    const char *rank = getenv("RANK");
    count("rank", rank ? rank : "", 0);
}

// Events of a kind in a phase ("": in all), since the process began.
unsigned long nullgpu_count(const char *kind, const char *in_phase) {
    unsigned long found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; table && i < ROWS; i++)
        if (!strcmp(table[i].kind, kind) && (!*in_phase || !strcmp(table[i].phase, in_phase)))
            found += table[i].count;
    pthread_mutex_unlock(&lock);
    return found;
}
