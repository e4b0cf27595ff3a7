// A thread that gives way: calls run there one by one, and what it does with files.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "tiercel/background.hpp"

using namespace tiercel;

TEST(calls_of_any_thread_run_one_by_one_and_give_their_own_results) {
  Background background;
  std::atomic<int> n_running{0}, n_wrong{0};
  std::vector<std::thread> callers;
  for (int64_t i = 0; i < 4; ++i)
    callers.emplace_back([&, i] {
      for (int64_t j = 0; j < 200; ++j) {
        const int64_t got = background.run([&] {
          if (n_running.fetch_add(1) != 0) ++n_wrong;
          n_running.fetch_sub(1);
          return 1000 * i + j;
        });
        if (got != 1000 * i + j) ++n_wrong;
      }
    });
  for (auto& caller : callers) caller.join();
  CHECK(n_wrong == 0);
}

TEST(a_file_made_in_the_background_is_its_owners_new_and_locked) {
  char folder[] = "/tmp/tiercel_background_XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const std::string temp = std::string(folder) + "/temp", name = std::string(folder) + "/name";
  const auto fd = static_cast<int>(create_locked(temp.c_str()));
  CHECK(fd >= 0);
  struct stat status{};
  CHECK(fstat(fd, &status) == 0 && (status.st_mode & 07777) == 0600);
  const int other = open(temp.c_str(), O_RDONLY);
  CHECK(flock(other, LOCK_EX | LOCK_NB) != 0);
  CHECK(create_locked(temp.c_str()) == -EEXIST);
  const std::vector<uint8_t> data(10000, 7);
  CHECK(write_some(fd, data) == 10000);
  CHECK(rename_file(temp.c_str(), name.c_str()) == 0);
  CHECK(rename_file(temp.c_str(), name.c_str()) == -ENOENT);
  CHECK(symlink(name.c_str(), temp.c_str()) == 0);
  CHECK(create_locked(temp.c_str()) == -EEXIST);
  close(fd);
  CHECK(flock(other, LOCK_EX | LOCK_NB) == 0);
  CHECK(write_some(other, data) == -EBADF); // open for reading only
  close(other);
  unlink(temp.c_str());
  unlink(name.c_str());
  rmdir(folder);
}
