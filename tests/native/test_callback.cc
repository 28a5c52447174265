// A copy of libstdc++'s std::function by its layout, in the form in which TensorFlow passes callbacks.
#include <functional>
#include <memory>

#include "check.h"
#include "plugins/tensorflow/callback.h"

using farandole::tensorflow::Callback;

int main() {
#if defined(__GLIBCXX__)
  const auto counter = std::make_shared<int>(0);
  auto function = std::make_unique<std::function<void()>>([counter] { ++*counter; });
  CHECK_EQ(counter.use_count(), 2);
  {
    Callback copy(reinterpret_cast<const Callback&>(*function));
    CHECK_EQ(counter.use_count(), 3);
    function.reset();
    reinterpret_cast<const std::function<void()>&>(copy)();
    CHECK_EQ(*counter, 1);
  }
  CHECK_EQ(counter.use_count(), 1);
  const std::function<void()> nothing;
  CHECK(!reinterpret_cast<const std::function<void()>&>(
      *std::make_unique<Callback>(reinterpret_cast<const Callback&>(nothing))));
#endif
  return check::report();
}
