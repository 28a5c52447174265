// A sum of float32 by oneCCL, for bench/collective_peers.py, which loads this file's library with ctypes.

#include <algorithm>
#include <cstddef>
#include <oneapi/ccl.hpp>
#include <optional>

namespace {

ccl::shared_ptr_class<ccl::kvs> store;
std::optional<ccl::communicator> world;

}  // namespace

extern "C" {

size_t address_size() { return ccl::kvs::address_max_size; }

/// Makes the store where the ranks meet, on rank 0, and writes its address.
void make_store(char* address) {
  ccl::init();
  store = ccl::create_main_kvs();
  const ccl::kvs::address_type made = store->get_address();
  std::copy(made.begin(), made.end(), address);
}

/// Joins the ranks. Waits for all of them.
void join(const char* address, int size, int rank) {
  ccl::init();
  if (!store) {
    ccl::kvs::address_type given;
    std::copy_n(address, given.size(), given.begin());
    store = ccl::create_kvs(given);
  }
  world.emplace(ccl::create_communicator(size, rank, store));
}

/// Sums `count` values in place over the ranks.
void sum(float* values, size_t count) {
  ccl::allreduce(values, values, count, ccl::datatype::float32, ccl::reduction::sum, *world).wait();
}
}
