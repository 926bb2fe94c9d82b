/* Preloaded into NVIDIA's front end (cicc): parse the headers once, then compile each kernel in a forked copy.
 *
 * When cicc opens the file named by TKBUILD_FORK_AT (the include that follows the headers), it stops there and reads
 * folder names, one a line, from stdin. For each it forks; the child goes on as if nothing had happened, except that
 * every path below the server's folder means the same name below the child's. So a child's state is that of a cicc
 * which parsed the same text on its own. The server answers on stdout:
 *
 *     ready             the headers are parsed
 *     pid P             a child was started, in a process group of its own
 *     done P STATUS     it ended; STATUS as waitpid gives it
 *
 * It ends when stdin does, and its children end with it.
 *
 * A process that it is preloaded into starts again without random addresses, where the kernel allows that, and its clocks stand
 * still: the order in which cicc goes through what it has at addresses, and how long it takes, decided on the code of a kernel.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATH_BYTES = 2 * PATH_MAX, SETUP_FAILED = 113 };

static char server_folder[PATH_MAX];
static char child_folder[PATH_MAX];
static int is_child;

static const char *in_child_folder(const char *path, char *buffer) {
  size_t length = strlen(server_folder);
  if (!is_child || path == NULL || strncmp(path, server_folder, length) != 0 || path[length] != '/') return path;
  snprintf(buffer, PATH_BYTES, "%s%s", child_folder, path + length);
  return buffer;
}

static void become_child(const sigset_t *signals) {
  is_child = 1;
  sigprocmask(SIG_SETMASK, signals, NULL);
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int nothing = open("/dev/null", O_RDONLY);
  if (chdir(child_folder) != 0 || nothing < 0) _exit(SETUP_FAILED);
  int log = open("log", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (log < 0 || dup2(nothing, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0) _exit(SETUP_FAILED);
}

static void report_ended_children(int child_fd) {
  struct signalfd_siginfo ignored;
  while (read(child_fd, &ignored, sizeof ignored) > 0) {
  }
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) dprintf(1, "done %d %d\n", pid, status);
}

/* Reads one more byte of the current line; returns 1 when the line is complete. */
static int read_line(void) {
  static size_t have = 0;
  char byte;
  if (read(0, &byte, 1) != 1) _exit(0);
  if (byte != '\n') {
    if (have + 1 == sizeof child_folder) _exit(SETUP_FAILED);
    child_folder[have++] = byte;
    return 0;
  }
  child_folder[have] = 0;
  have = 0;
  return 1;
}

/* Returns in each child; the server itself never returns. */
static void serve(void) {
  sigset_t child_signal, before;
  sigemptyset(&child_signal);
  sigaddset(&child_signal, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child_signal, &before);
  int child_fd = signalfd(-1, &child_signal, SFD_CLOEXEC | SFD_NONBLOCK);
  dprintf(1, "ready\n");
  for (;;) {
    struct pollfd events[2] = {{0, POLLIN, 0}, {child_fd, POLLIN, 0}};
    if (poll(events, 2, -1) < 0) {
      if (errno == EINTR) continue;
      _exit(SETUP_FAILED);
    }
    if (events[1].revents) report_ended_children(child_fd);
    if (!events[0].revents || !read_line()) continue;
    pid_t pid = fork();
    if (pid == 0) {
      become_child(&before);
      return;
    }
    dprintf(1, "pid %d\n", pid);
  }
}

static void serve_at(const char *path) {
  const char *point = getenv("TKBUILD_FORK_AT");
  if (is_child || path == NULL || point == NULL || strcmp(path, point) != 0) return;
  snprintf(server_folder, sizeof server_folder, "%s", point);
  *strrchr(server_folder, '/') = 0;
  serve();
}

__attribute__((constructor)) static void fix_addresses(int count, char **arguments, char **environment) {
  (void)count;
  int now = personality(0xFFFFFFFF);
  if (now < 0 || (now & ADDR_NO_RANDOMIZE) || personality(now | ADDR_NO_RANDOMIZE) < 0) return;
  if (personality(0xFFFFFFFF) & ADDR_NO_RANDOMIZE) execve("/proc/self/exe", arguments, environment);
}

clock_t clock(void) { return 0; }

int clock_gettime(clockid_t which, struct timespec *now) {
  (void)which;
  *now = (struct timespec){0, 0};
  return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  *now = (struct timeval){0, 0};
  return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

FILE *fopen(const char *path, const char *mode) {
  char buffer[PATH_BYTES];
  serve_at(path);
  return REAL(fopen)(in_child_folder(path, buffer), mode);
}

FILE *fopen64(const char *path, const char *mode) {
  char buffer[PATH_BYTES];
  serve_at(path);
  return REAL(fopen64)(in_child_folder(path, buffer), mode);
}

int open(const char *path, int flags, ...) {
  char buffer[PATH_BYTES];
  va_list rest;
  va_start(rest, flags);
  int mode = va_arg(rest, int);
  va_end(rest);
  return REAL(open)(in_child_folder(path, buffer), flags, mode);
}

int unlink(const char *path) {
  char buffer[PATH_BYTES];
  return REAL(unlink)(in_child_folder(path, buffer));
}

/* The stat of binaries linked against glibc before 2.33. */
int __xstat(int version, const char *path, struct stat *status);
int __xstat(int version, const char *path, struct stat *status) {
  char buffer[PATH_BYTES];
  (void)version;
  return stat(in_child_folder(path, buffer), status);
}
