// Runs a fuzz target without a fuzzer: fuzz_driver SECONDS SEED FOLDER replays the files of FOLDER and then mutates
// them. SEED 0 draws a seed; a seed always gives the same inputs in the same order. A failure is a crash, after the
// seed was printed.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::vector<uint8_t>;
using Random = std::mt19937_64;

constexpr size_t kLongest = 4096;

std::vector<Input> read_seeds(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());  // so that the same seed draws the same files
  std::vector<Input> seeds;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

size_t below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

void mutate(Input& input, const Input& other, Random& random) {
  const auto at = [&] { return input.begin() + static_cast<std::ptrdiff_t>(below(random, input.size())); };
  // The edges of counts, of LEB128 groups and of signs.
  constexpr uint8_t kEdges[] = {0, 1, 2, 3, 0x3F, 0x40, 0x7F, 0x80, 0x81, 0xFE, 0xFF};
  if (input.empty()) input.push_back(0);
  switch (below(random, 7)) {
    case 0: *at() = static_cast<uint8_t>(random()); break;
    case 1: *at() ^= static_cast<uint8_t>(1U << below(random, 8)); break;
    case 2: *at() = kEdges[below(random, std::size(kEdges))]; break;
    case 3: input.insert(at(), 1 + below(random, 10), kEdges[below(random, std::size(kEdges))]); break;
    case 4: input.erase(at()); break;
    case 5: input.erase(at(), input.end()); break;
    default: {
      // A part of another input in the middle of this one.
      const size_t begin = below(random, other.size());
      const size_t length = below(random, other.size() - begin + 1);
      const auto from = other.begin() + static_cast<std::ptrdiff_t>(begin);
      input.insert(at(), from, from + static_cast<std::ptrdiff_t>(length));
    }
  }
  if (input.size() > kLongest) input.resize(kLongest);
}

void run(const Input& input) {
  // A copy of exactly this size, so that a sanitizer sees a read beyond the end.
  const std::vector<uint8_t> exact(input.begin(), input.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: fuzz_driver SECONDS SEED FOLDER\n";
    return 2;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::stod(argv[1]));
  uint64_t seed = std::stoull(argv[2]);
  if (seed == 0) seed = std::random_device{}();
  std::cout << "seed " << seed << std::endl;

  const std::vector<Input> seeds = read_seeds(argv[3]);
  if (seeds.empty()) {
    std::cerr << "no seeds in " << argv[3] << "\n";
    return 2;
  }
  for (const Input& input : seeds) run(input);
  run({});

  Random random(seed);
  uint64_t inputs = 0;
  for (; std::chrono::steady_clock::now() < end; ++inputs) {
    Input input = seeds[below(random, seeds.size())];
    for (size_t changes = 1 + below(random, 6); changes > 0; --changes)
      mutate(input, seeds[below(random, seeds.size())], random);
    run(input);
  }
  std::cout << seeds.size() << " seeds and " << inputs << " inputs made of them\n";
  return 0;
}
