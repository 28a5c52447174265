// Writes what fuzz_wire starts from: write_wire_seeds FOLDER. To be run again, and its files committed, when the format
// of control messages changes; with --check it compares, so that stale seeds are noticed.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <string>

#include "base/error.h"
#include "engine/wire.h"

using namespace farandole;

namespace {

template <class Payload>
std::string body(const Payload& payload) {
  Bytes frame;
  encode(payload, frame);
  return {reinterpret_cast<const char*>(frame.data()) + kFrameHeader, frame.size() - kFrameHeader};
}

Request request(Kind kind, const std::string& name) {
  Request request;
  request.name = name;
  request.kind = kind;
  request.shape = {3, 1 << 20};
  return request;
}

std::map<std::string, std::string> seeds() {
  Request alltoall = request(Kind::Alltoall, "alltoall.ragged");
  alltoall.splits = {0, 1, 2};
  Request grouped = request(Kind::Allreduce, "grouped.0");
  grouped.group = "a group";
  grouped.group_size = 2;
  grouped.prescale = 0.5;
  grouped.cacheable = false;
  Request broadcast = request(Kind::Broadcast, "broadcast.model");
  broadcast.root = 3;

  Asking many;
  for (uint32_t id = 0; id < 300; ++id) many.emplace_back(id * 50);
  const Bundle fused{Kind::Allreduce, {{"a", 1, {}}, {"b", 2, {}}, {"c", 300, {}}}};
  const Bundle ragged{Kind::Allgather, {{"rows", 7, {0, 5, int64_t{1} << 40}}}};
  return {
      {"asking_nothing", body(Asking{})},
      {"asking_by_number", body(many)},
      {"asking_in_full", body(Asking{alltoall, grouped, broadcast, 12U, request(Kind::Barrier, "barrier.noname.0")})},
      {"plan_bundles", body(Plan{fused, ragged})},
      {"plan_mismatch", body(Plan{Refusal{"x", Error::mismatch("x", "dtype", {{0, "float32"}, {3, "float16"}})}})},
      {"plan_timeout", body(Plan{Refusal{"x", Error::timeout("x", {1, 2, 70000}, 600.5)}, fused})},
      {"plan_lost", body(Plan{Refusal{"x", Error::peer_lost("x", 5, "its process was killed or crashed")}})},
      {"farewell_clean", body(Farewell{2, true, "it has shut down"})},
      {"farewell_lost", body(Farewell{-1, false, ""})},
      {"hostile_count", std::string("\x01\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 10)},
      {"hostile_text", std::string("\x03\x02\x01\xff\xff\xff\xff\x0f", 8)},
  };
}

}  // namespace

int main(int argc, char** argv) {
  const bool check = argc == 3 && std::string(argv[1]) == "--check";
  if (argc != 2 && !check) {
    std::cerr << "usage: write_wire_seeds [--check] FOLDER\n";
    return 2;
  }
  int stale = 0;
  for (const auto& [name, bytes] : seeds()) {
    const auto path = std::filesystem::path(argv[argc - 1]) / name;
    if (!check) {
      std::ofstream(path, std::ios::binary) << bytes;
      continue;
    }
    std::ifstream file(path, std::ios::binary);
    if (std::string(std::istreambuf_iterator<char>(file), {}) == bytes) continue;
    std::cerr << path << " is stale: run write_wire_seeds on this folder\n";
    ++stale;
  }
  return stale == 0 ? 0 : 1;
}
