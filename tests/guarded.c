/* malloc with a fence: memory of 64 KiB and more (tensors' on a CPU) ends where a page begins that cannot be
   touched, begins with other bytes than 0, and cannot be touched after it is freed, for good. Whoever reads
   or writes there ends at once, with a stack (tests/guarded.py). Smaller memory is glibc's. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define LEAST (64ul << 10)
#define PAGE 4096ul
#define ARENA (32ul << 40) /* addresses, of which each is given away once */
#define FRESH 0xa5

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

struct header { /* at the beginning of the page below the memory */
    size_t size, mapped;
    char *start;
};

static _Atomic(char *) arena;
static atomic_size_t used;

static char *whole_arena(void) {
    char *known = atomic_load(&arena);
    if (known) return known;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *made = mmap(NULL, ARENA, PROT_NONE, flags, -1, 0);
    if (made == MAP_FAILED) __builtin_trap();
    if (!atomic_compare_exchange_strong(&arena, &known, made)) {
        munmap(made, ARENA);
        return known;
    }
    return made;
}

static int ours(const void *p) {
    const char *begin = atomic_load(&arena);
    return begin && (const char *)p >= begin && (const char *)p < begin + ARENA;
}

static struct header *header_of(void *p) {
    return (struct header *)(((uintptr_t)p & ~(PAGE - 1)) - PAGE);
}

static void *fenced(size_t align, size_t size, int fill) {
    if (align > PAGE) return __libc_memalign(align, size);
    size_t pages = (size + align + PAGE - 1) / PAGE * PAGE, mapped = PAGE + pages;
    size_t at = atomic_fetch_add(&used, mapped + PAGE); /* and the fence */
    if (at + mapped + PAGE > ARENA) __builtin_trap();
    char *start = whole_arena() + at;
    char *p = (char *)((uintptr_t)(start + mapped - size) & ~(align - 1));
    if (p < start + PAGE || mprotect(start, mapped, PROT_READ | PROT_WRITE)) {
        errno = ENOMEM;
        return NULL;
    }
    /* Where the memory begins within its first page, that page's own header lies below it. */
    struct header *h = header_of(p);
    *h = (struct header){size, mapped, start};
    if (fill) memset(p, FRESH, size);
    return p;
}

void *malloc(size_t size) { return size < LEAST ? __libc_malloc(size) : fenced(16, size, 1); }

void *calloc(size_t number, size_t each) {
    size_t size;
    if (__builtin_mul_overflow(number, each, &size)) return NULL;
    return size < LEAST ? __libc_calloc(number, each) : fenced(16, size, 0);
}

void *memalign(size_t align, size_t size) {
    if (size < LEAST) return __libc_memalign(align, size);
    return fenced(align < 16 ? 16 : align, size, 1);
}

void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }

int posix_memalign(void **out, size_t align, size_t size) {
    void *p = memalign(align, size);
    if (p) *out = p;
    return p ? 0 : ENOMEM;
}

void free(void *p) {
    if (!ours(p)) {
        __libc_free(p);
        return;
    }
    struct header h = *header_of(p); /* of memory that is free already it cannot be read */
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(h.start, h.mapped, PROT_NONE, flags, -1, 0) == MAP_FAILED) __builtin_trap();
}

size_t malloc_usable_size(void *p) {
    static size_t (*theirs)(void *);
    extern void *dlsym(void *, const char *);
    if (ours(p)) return header_of(p)->size;
    if (!theirs) theirs = (size_t(*)(void *))dlsym((void *)-1l, "malloc_usable_size");
    return p ? theirs(p) : 0;
}

void *realloc(void *p, size_t size) {
    if (!p) return malloc(size);
    if (!ours(p) && size < LEAST) return __libc_realloc(p, size);
    if (!size) {
        free(p);
        return NULL;
    }
    size_t had = malloc_usable_size(p);
    void *moved = malloc(size);
    if (!moved) return NULL;
    memcpy(moved, p, had < size ? had : size);
    free(p);
    return moved;
}
