#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace farandole;

namespace {

void check_contains(const Error& error, const std::vector<std::string>& parts) {
  const std::string text = error.what();
  for (const std::string& part : parts) {
    check::that(text.find(part) != std::string::npos, "the text names it", part + " in: " + text);
  }
}

void test_every_kind_keeps_its_fields_and_says_them() {
  const Error invalid = Error::invalid("fc.weight", "must be contiguous");
  CHECK(invalid.kind == ErrorKind::Invalid);
  CHECK_EQ(invalid.reason, "must be contiguous");
  check_contains(invalid, {"'fc.weight'", "must be contiguous"});

  const Error mismatch = Error::mismatch("fc.weight", "dtype", {{3, "float16"}, {0, "float32"}});
  CHECK(mismatch.kind == ErrorKind::Mismatch);
  CHECK_EQ(mismatch.what_differs, "dtype");
  CHECK_EQ(mismatch.asked.at(3), "float16");
  check_contains(mismatch, {"'fc.weight' differs between ranks in its dtype", "(rank 0: float32; rank 3: float16)"});

  const Error one = Error::timeout("grad", {2}, 0.25);
  CHECK(one.kind == ErrorKind::Timeout);
  CHECK(one.ranks == std::vector<int>{2});
  CHECK_EQ(one.waited, 0.25);
  check_contains(one, {"'grad'", "rank 2 did not", "0.2 s"});
  check_contains(Error::timeout("grad", {1, 2}, 600), {"ranks 1, 2 did not", "600 s"});
  check_contains(Error::timeout("grad", {}, 600), {"no progress", "600 s"});

  const Error lost = Error::peer_lost("", 5, "was killed or crashed");
  CHECK(lost.kind == ErrorKind::PeerLost);
  CHECK_EQ(lost.rank, 5);
  check_contains(lost, {"rank 5 is lost (was killed or crashed)", "Restart"});

  const Error closed = Error::closed("shutdown() was called");
  CHECK(closed.kind == ErrorKind::Closed);
  check_contains(closed, {"shutdown() was called"});
  const Error internal = Error::internal("a plan without tensors");
  CHECK(internal.kind == ErrorKind::Internal);
  check_contains(internal, {"a plan without tensors"});
}

void test_named_changes_the_name_and_nothing_else() {
  const Error lost = Error::peer_lost("", 5, "reset the connection").named("grad");
  CHECK_EQ(lost.name, "grad");
  CHECK_EQ(lost.rank, 5);
  CHECK_EQ(lost.reason, "reset the connection");
  check_contains(lost, {"'grad'", "rank 5"});
  const Error late = Error::timeout("", {1}, 3).named("grad");
  CHECK(late.ranks == std::vector<int>{1} && late.waited == 3);
  const Error mismatch = Error::mismatch("", "shape", {{0, "[1]"}}).named("grad");
  CHECK(mismatch.what_differs == "shape" && mismatch.asked.size() == 1);
  CHECK_EQ(Error::invalid("", "no").named("grad").reason, "no");
  CHECK_EQ(Error::joined("", "no").named("grad").reason, "no");
  CHECK_EQ(Error::closed("bye").named("grad").name, "");
}

void test_some_ranks_are_named_by_their_numbers_in_the_job() {
  const std::vector<int> members{1, 4, 7};
  const Error lost = Error::peer_lost("grad", 2, "left").among("process set 3", members);
  CHECK(lost.rank == 7 && lost.process_set == "process set 3" && lost.name == "grad" && lost.reason == "left");
  check_contains(lost, {"rank 7"});
  const Error again = lost.named("bias").among("process set 3", members);
  CHECK(again.rank == 7 && again.process_set == "process set 3" && again.name == "bias");
  const Error late = Error::timeout("grad", {0, 1}, 3).among("process set 3", members);
  CHECK((late.ranks == std::vector<int>{1, 4}) && late.waited == 3);
  const Error mismatch = Error::mismatch("grad", "shape", {{0, "[1]"}, {2, "[2]"}}).among("process set 3", members);
  CHECK((mismatch.asked == std::map<int, std::string>{{1, "[1]"}, {7, "[2]"}}));
  const Error roots = Error::mismatch("grad", "root rank", {{0, "root 1"}, {1, "root 2"}}).among("a set", members);
  CHECK((roots.asked == std::map<int, std::string>{{1, "root 4"}, {4, "root 7"}}));
  check_contains(Error::internal("no").among("process set 3", members), {"no (in process set 3)"});
  CHECK(Error::closed("bye").among("process set 3", members).process_set == "process set 3");
  const Error of_all = Error::peer_lost("grad", 2, "left").among("", {});
  CHECK(of_all.rank == 2 && of_all.process_set.empty());
}

void test_it_is_a_value() {
  static_assert(std::is_copy_assignable_v<Error> && std::is_copy_constructible_v<Error>);
  Error kept = Error::closed("first");
  kept = Error::peer_lost("grad", 1, "left");
  CHECK_EQ(std::string(kept.what()), std::string(Error::peer_lost("grad", 1, "left").what()));
  for (const ErrorKind kind : {ErrorKind::Invalid, ErrorKind::Mismatch, ErrorKind::Timeout, ErrorKind::PeerLost,
                               ErrorKind::Closed, ErrorKind::Internal, ErrorKind::Joined, ErrorKind::Fabric}) {
    CHECK(std::string(name_of(kind)) != "unknown");
  }
}

}  // namespace

int main() {
  test_every_kind_keeps_its_fields_and_says_them();
  test_named_changes_the_name_and_nothing_else();
  test_some_ranks_are_named_by_their_numbers_in_the_job();
  test_it_is_a_value();
  return check::report();
}
