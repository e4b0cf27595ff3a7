#include "tiercel/background.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace tiercel {

namespace {

constexpr int kNicer = 10; // above 19 is 19

} // namespace

Background::Background() : thread_([this] { loop(); }) {}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

int64_t Background::run(const std::function<int64_t()>& call) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !is_taken_; });
  is_taken_ = true;
  call_ = &call;
  is_done_ = false;
  changed_.notify_all();
  changed_.wait(lock, [this] { return is_done_; });
  const int64_t result = result_;
  is_taken_ = false;
  changed_.notify_all();
  return result;
}

double Background::cpu_s() {
#if defined(__linux__)
  clockid_t clock;
  timespec time{};
  if (pthread_getcpuclockid(thread_.native_handle(), &clock) == 0 && clock_gettime(clock, &time) == 0)
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
#endif
  return 0.0;
}

void Background::loop() {
#if defined(__linux__)
  // Of this thread alone, as Linux has it; a refusal only costs speed. Some ten levels are a tenth of a processor's time
  // where all are busy: not the least, nor the idle class, in which a store could wait for ever.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), getpriority(PRIO_PROCESS, 0) + kNicer);
#endif
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return call_ != nullptr || is_ending_; });
    if (call_ == nullptr) return;
    const auto* call = call_;
    call_ = nullptr;
    lock.unlock();
    const int64_t result = (*call)();
    lock.lock();
    result_ = result;
    is_done_ = true;
    changed_.notify_all();
  }
}

int64_t create_locked(const char* path) {
  const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return -errno;
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    close(fd);
    unlink(path);
    return -error;
  }
  return fd;
}

int64_t write_some(int fd, std::span<const uint8_t> data) {
  ssize_t n;
  do n = write(fd, data.data(), data.size());
  while (n < 0 && errno == EINTR);
  return n < 0 ? -errno : n;
}

int64_t rename_file(const char* path, const char* to) { return rename(path, to) == 0 ? 0 : -errno; }

} // namespace tiercel
