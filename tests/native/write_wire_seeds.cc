// Writes the seeds of fuzz_wire: write_wire_seeds FOLDER. Run it and commit its files when the format of control
// messages changes. With --check it compares, so that stale seeds are noticed.
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
  broadcast.on_device = true;

  CollectedRequests many;
  for (uint32_t id = 0; id < 300; ++id) many.emplace_back(NumberRange{kSender, true, id * 50, id % 3 + 1});
  const CollectedRequests apart{NumberRange{5, true, 0, 200}, NumberRange{70000, false, 300, 1}};
  const Bytes values{std::byte{0}, std::byte{0x80}, std::byte{0xff}, std::byte{1}};
  const CollectedRequests carrying{RequestWithInput{3, 200, values}, RequestWithInput{70000, 0, {}},
                                   NumberRange{kSender, true, 12, 1}};
  const CollectedRequests in_full{FullRequest{0, alltoall}, FullRequest{1, grouped}, FullRequest{70000, broadcast},
                                  NumberRange{kSender, true, 12, 1},
                                  FullRequest{2, request(Kind::Barrier, "barrier.noname.0")}};
  const Bucket fused{Kind::Allreduce, {{"a", 1, {}}, {"b", 2, {}}, {"c", 300, {}}}};
  const Bucket known{Kind::Allreduce, {{{}, 0, {}, 200}, {{}, 1000, {}}, {"new", 1001, {}}}};
  const Bucket reduced{Kind::Allreduce, {{{}, 3, {}, 1, std::nullopt, values}, {{}, 300, {}, 1, std::nullopt, values}}};
  const Bucket ragged{Kind::Allgather, {{"rows", 7, {0, 5, int64_t{1} << 40}}}};
  const Bucket joined{Kind::Allreduce, {{"grouped.0", kNoId, {}, 1, grouped}}};
  const Bucket all_joined{Kind::Join, {{"join", kNoId, {2}}}};
  const Refusal lost_rows{"x", Error::joined("x", "Reducescatter is not supported with Join at this time")};
  return {
      {"asking_nothing", body(CollectedRequests{})},
      {"asking_by_number", body(many)},
      {"asking_apart", body(apart)},
      {"asking_in_full", body(in_full)},
      {"asking_with_inputs", body(carrying)},
      {"plan_buckets", body(Plan{fused, ragged})},
      {"plan_numbers", body(Plan{known})},
      {"plan_results", body(Plan{reduced, known})},
      {"plan_knobs", body(Plan{Knobs{0, 4096, 1 << 20, 0, false}, fused})},
      {"plan_joined", body(Plan{joined, lost_rows, all_joined})},
      {"plan_mismatch", body(Plan{Refusal{"x", Error::mismatch("x", "dtype", {{0, "float32"}, {3, "float16"}})}})},
      {"plan_timeout", body(Plan{Refusal{"x", Error::timeout("x", {1, 2, 70000}, 600.5)}, fused})},
      {"plan_lost", body(Plan{Refusal{"x", Error::peer_lost("x", 5, "its process was killed or crashed")}})},
      {"departure_clean", body(Departure{2, true, "it has shut down", 1})},
      {"departure_lost", body(Departure{-1, false, ""})},
      {"heartbeat", body(Heartbeat{})},
      {"hostile_count", std::string("\x01\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 10)},
      {"hostile_run", std::string("\x02\x01\x00\x00\x01\x00\x00\xff\xff\xff\xff\x0f", 12)},
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
